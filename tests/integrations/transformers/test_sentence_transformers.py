"""Models inside other modules, as sentence-transformers holds them."""

from __future__ import annotations

import string

import pytest
import torch
import transformers
from torch import nn

from tests.integrations.transformers.cases import (
    accelerate,
    bloom,
    lengths_mask,
    mpnet,
    tokens,
    unaccelerate,
)
from tests.support.numerics import assert_same_model


class Transformer(nn.Module):
    """A model, from and to the dictionaries of sentence-transformers."""

    def __init__(self, auto_model):
        super().__init__()
        self.auto_model = auto_model

    @property
    def config(self):
        return self.auto_model.config

    def forward(self, features: dict) -> dict:
        return {**features, "states": self.auto_model(**features).last_hidden_state}


class Mean(nn.Module):
    def forward(self, features: dict):
        mask = features["attention_mask"][..., None]
        return (features["states"] * mask).sum(1) / mask.sum(1)


def test_the_model_of_a_module_is_found():
    from biased_flash_attn.integrations.transformers import NAME

    model = nn.Sequential(Transformer(mpnet("Model")), Mean()).eval()
    mask = lengths_mask("right", 3, 40)
    features = {"input_ids": tokens(3, 40), "attention_mask": mask}
    expected = model(features)
    assert accelerate(model) is model
    assert model[0].auto_model.config._attn_implementation == NAME
    assert_same_model(model(features), expected, "embeddings")
    assert accelerate(model) is model
    assert torch.equal(unaccelerate(model)(features), expected)


def test_several_models_of_a_module():
    from biased_flash_attn.integrations.transformers import NAME

    models = nn.ModuleList([mpnet("Model"), bloom()])
    ids = tokens(2, 20)
    expected = [model(ids)[0] for model in models]
    for model, result in zip(accelerate(models), expected, strict=True):
        assert model.config._attn_implementation == NAME
        assert_same_model(model(ids)[0], result, "results")


# Importing sentence-transformers takes seconds.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_sentence_transformers(tmp_path):
    """A text of one token to 500 words, in batches that sentence-transformers sorts by length."""
    package = pytest.importorskip(
        "sentence_transformers", reason="needs pip install sentence-transformers"
    )
    words = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>", *string.ascii_lowercase]
    mpnet("Model", vocab_size=len(words)).save_pretrained(tmp_path)
    vocabulary = {word: number for number, word in enumerate(words)}
    transformers.MPNetTokenizerFast(vocab=vocabulary).save_pretrained(tmp_path)
    model = package.SentenceTransformer(str(tmp_path))
    texts = [
        " ".join(words[int(i)] for i in torch.randint(5, len(words), (n,)))
        for n in torch.randint(1, 500, (10,)).tolist()
    ]
    expected = model.encode(texts, batch_size=4, convert_to_tensor=True)
    accelerate(model)
    actual = model.encode(texts, batch_size=4, convert_to_tensor=True)
    assert_same_model(actual, expected, "embeddings")
    assert expected.std(0).min() > 0.01
