"""Pipelines of transformers, with batches of texts of different lengths."""

from __future__ import annotations

import pytest
import torch

from tests.integrations.libraries.cases import save_bloom, save_mpnet, save_t5, texts
from tests.integrations.transformers.cases import accelerate, unaccelerate
from tests.support.numerics import assert_same_model

LENGTHS = (1, 37, 90, 12, 60)


def pipeline(task: str, folder):
    from transformers import pipeline

    return pipeline(task, str(folder), batch_size=3)


def test_feature_extraction(tmp_path):
    """Its results include those of padding, which are 0 in an accelerated MPNet."""
    save_mpnet(tmp_path, "Model")
    pipe, inputs = pipeline("feature-extraction", tmp_path), texts(*LENGTHS)
    expected = pipe(inputs)
    assert accelerate(pipe) is pipe
    for actual, theirs, n in zip(pipe(inputs), expected, LENGTHS, strict=True):
        actual, theirs = (torch.tensor(x[0]) for x in (actual, theirs))
        assert_same_model(actual[: n + 2], theirs[: n + 2], "features")
        assert not actual[n + 2 :].any()
    assert unaccelerate(pipe) is pipe
    assert pipe(inputs) == expected


def test_fill_mask(tmp_path):
    save_mpnet(tmp_path)
    pipe = pipeline("fill-mask", tmp_path)
    inputs = [f"{text} <mask> {text}" for text in texts(*LENGTHS)]
    expected = pipe(inputs, top_k=30)
    accelerate(pipe)
    for actual, theirs in zip(pipe(inputs, top_k=30), expected, strict=True):
        scores = [{x["token_str"]: x["score"] for x in results} for results in (actual, theirs)]
        for word, score in scores[1].items():
            assert scores[0][word] == pytest.approx(score, rel=1e-4, abs=1e-6)


def test_text_classification(tmp_path):
    save_t5(tmp_path, head="SequenceClassification", num_labels=3)
    pipe, inputs = pipeline("text-classification", tmp_path), texts(*LENGTHS)
    options = {"top_k": None, "function_to_apply": "none"}
    expected = pipe(inputs, **options)
    accelerate(pipe)
    for results in zip(pipe(inputs, **options), expected, strict=True):
        scores = ([x["score"] for x in sorted(y, key=lambda x: x["label"])] for y in results)
        assert_same_model(*map(torch.tensor, scores), "scores")


def test_text_generation(tmp_path):
    save_bloom(tmp_path)
    pipe, prompts = pipeline("text-generation", tmp_path), texts(*LENGTHS)
    options = {"min_new_tokens": 20, "max_new_tokens": 20, "do_sample": False}
    expected = pipe(prompts, **options)
    accelerate(pipe)
    assert pipe(prompts, **options) == expected
    beams = {"num_beams": 3, **options}
    actual = pipe(prompts, **beams)
    assert actual == unaccelerate(pipe)(prompts, **beams)
    assert len({text[0]["generated_text"][-20:] for text in expected}) > 1
