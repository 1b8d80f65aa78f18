"""Models inside other modules or objects, as libraries hold them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from tests.integrations.transformers.cases import (
    accelerate,
    bloom,
    inputs_of,
    lengths_mask,
    mpnet,
    t5,
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


@pytest.mark.parametrize("inner", [t5, lambda: nn.Sequential(t5())])
def test_objects_that_hold_a_model(inner):
    """As pipelines do, which are no modules."""
    pipeline = SimpleNamespace(model=inner())
    model = next(x for x in pipeline.model.modules() if isinstance(x, PreTrainedModel))
    inputs = inputs_of(model, 2, 20)
    expected = model(**inputs).logits
    assert accelerate(pipeline) is pipeline
    assert type(model.encoder.block[0].layer[0].SelfAttention).__name__ == "FusedT5Attention"
    assert_same_model(model(**inputs).logits, expected, "logits")
    assert accelerate(pipeline) is pipeline
    assert unaccelerate(pipeline) is pipeline
    assert torch.equal(model(**inputs).logits, expected)
