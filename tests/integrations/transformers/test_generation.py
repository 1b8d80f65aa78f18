"""`generate` returns the same texts if a model runs on this package."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from tests.integrations.transformers.cases import (
    DECODERS,
    ENCODER_DECODERS,
    INKLINGS,
    accelerated,
    assert_same_steps,
    bloom,
    inkling,
    inkling2,
    lengths_mask,
    t5,
    tokens,
)
from tests.support.numerics import assert_same_model

NEW_TOKENS = 64


def inputs_for(name: str, side: str) -> dict:
    mask = lengths_mask(side, 3, 24)
    ids = tokens(3, 24)
    return {"input_ids": ids if mask is None else ids * mask, "attention_mask": mask}


def generate(model, inputs: dict, **options):
    defaults = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    defaults |= {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    options = {**defaults, **options}
    result = model.generate(**inputs, **options)
    if options["output_logits"]:
        assert len(result.logits) == options["max_new_tokens"]
    return result


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", [*DECODERS, *INKLINGS])
def test_greedy(name, side):
    model, inputs = (DECODERS | INKLINGS)[name](), inputs_for(name, side)
    assert_same_steps(generate(accelerated(model), inputs), generate(model, inputs))


@pytest.mark.parametrize("name", DECODERS)
def test_prompts_padded_on_the_right(name):
    """New tokens follow the padding, which then is between tokens."""
    model, inputs = DECODERS[name](), inputs_for(name, "right")
    ours, ids, last = accelerated(model), inputs["input_ids"], inputs["attention_mask"].sum(1) - 1
    options = {"use_cache": True, "attention_mask": inputs["attention_mask"]}
    caches = [(ours, None), (model, None)]
    with torch.no_grad():
        for step in range(12):
            results = [m(input_ids=ids, **options, cache=c) for m, c in caches]
            actual, expected = (x.logits[torch.arange(3), last] for x in results)
            assert_same_model(actual, expected, f"logits of step {step}")
            caches = [(m, x.cache) for m, x in zip((ours, model), results, strict=True)]
            ids, last = expected.argmax(1, keepdim=True), 0
            mask = options["attention_mask"]
            options["attention_mask"] = torch.cat([mask, torch.ones_like(ids)], 1)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_greedy_of_encoder_decoders(name, side):
    model, inputs = ENCODER_DECODERS[name](), inputs_for(name, side)
    assert_same_steps(generate(accelerated(model), inputs), generate(model, inputs))


@pytest.mark.parametrize("name", [*DECODERS, *INKLINGS, *ENCODER_DECODERS])
def test_beam_search(name):
    """Rounding decides between equally good beams, so their scores are compared."""
    model = (DECODERS | INKLINGS | ENCODER_DECODERS)[name]()
    inputs = inputs_for(name, "left")
    options = {
        "num_beams": 3,
        "num_return_sequences": 2,
        "max_new_tokens": 48,
        "output_scores": True,
    }
    actual = generate(accelerated(model), inputs, **options)
    expected = generate(model, inputs, **options)
    logits = torch.stack(expected.logits)
    assert_same_model(actual.sequences_scores, expected.sequences_scores, "scores", logits)
    scores = mean_logprobs(model, inputs, actual.sequences)
    assert_same_model(actual.sequences_scores, scores, "scores of our sequences", logits)


def logits_of_generated(model, inputs: dict, sequences: Tensor) -> tuple[Tensor, Tensor]:
    """The logits at the positions that follow the inputs, and the tokens chosen there."""
    per_input = len(sequences) // len(inputs["input_ids"])
    inputs = {name: x.repeat_interleave(per_input, 0) for name, x in inputs.items()}
    if model.config.is_encoder_decoder:
        inputs, given = {**inputs, "decoder_input_ids": sequences}, 1
    else:
        given = inputs["input_ids"].shape[1]
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(sequences[:, given:])], 1)
        inputs = {"input_ids": sequences, "attention_mask": mask}
        if "position_ids" in inspect.signature(model.forward).parameters:
            # `generate` does not count padding.
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(**inputs).logits[:, given - 1 : -1], sequences[:, given:, None]


def mean_logprobs(model, inputs: dict, sequences: Tensor) -> Tensor:
    """The mean log-probabilities of the tokens that follow the inputs, for each sequence."""
    logits, chosen = logits_of_generated(model, inputs, sequences)
    return logits.log_softmax(2).gather(2, chosen).mean((1, 2))


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon", "inkling", "inkling 2", "t5", "umt5"])
def test_cached_steps_equal_one_pass(name):
    model = accelerated((DECODERS | INKLINGS | ENCODER_DECODERS)[name]())
    ids, cache, key = tokens(2, 30), None, "input_ids"
    inputs = {}
    if name in ENCODER_DECODERS:
        inputs, key = {"input_ids": tokens(2, 20)}, "decoder_input_ids"
    with torch.no_grad():
        expected = model(**inputs, **{key: ids}).logits
        for start, end in ((0, 17), (17, 25), (25, 26), (26, 30)):
            step = {key: ids[:, start:end], "cache": cache, "use_cache": True}
            result = model(**inputs, **step)
            cache = result.cache
            assert_same_model(result.logits, expected[:, start:end], f"logits from {start} on")


def test_decoder_prompts_of_different_lengths():
    """Token 0 is both padding and the start of decoding."""
    model, mask = t5(), lengths_mask("left", 3, 12)
    prompts = tokens(3, 12) * mask
    prompts[:, 0] = 0
    inputs = {
        "input_ids": tokens(3, 24),
        "decoder_input_ids": prompts,
        "decoder_attention_mask": mask,
    }
    assert_same_steps(generate(accelerated(model), inputs), generate(model, inputs))


@pytest.mark.parametrize("make", [bloom, inkling, inkling2])
def test_prompt_lookup(make):
    """It proposes several tokens at once, and removes rejected ones from the cache. Each token must
    have the largest logit of one pass, or one that rounding does not tell from it."""
    ids = tokens(1, 8).repeat(1, 4)
    model, inputs = make(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"prompt_lookup_num_tokens": 4, "max_new_tokens": 24, "output_logits": False}
    ours = generate(accelerated(model), inputs, **options)
    assert ours.sequences.shape == (1, 32 + 24)
    logits, chosen = logits_of_generated(model, inputs, ours.sequences)
    best = logits.amax(2, keepdim=True)
    assert_same_model(logits.gather(2, chosen), best, "chosen logits", logits)
