"""`output_attentions=True` returns the weights of the model's own attention."""

from __future__ import annotations

import pytest
import torch
from transformers.models import falcon as theirs

from tests.integrations.transformers.cases import (
    DECODERS,
    ENCODER_DECODERS,
    INKLINGS,
    accelerated,
    assert_same_steps,
    bloom,
    inkling2,
    inputs_of,
    kept_by,
    lengths_mask,
    mpnet,
    mpt,
    t5,
    tokens,
)
from tests.support.numerics import assert_same_model

MODELS = DECODERS | INKLINGS | ENCODER_DECODERS | {"mpnet": mpnet}
KINDS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")


@pytest.fixture
def falcon_adds_its_bias_once(monkeypatch):
    """With output_attentions Falcon adds it twice, with every implementation."""
    own = theirs.modeling_falcon.build_alibi_tensor

    def halved(*args, **kwargs):
        return own(*args, **kwargs) / 2

    monkeypatch.setattr(theirs.modeling_falcon, "build_alibi_tensor", halved)


def weights_of(result) -> dict[str, tuple]:
    """Those of each layer, or of each step and layer."""
    return {kind: result[kind] for kind in KINDS if result.get(kind)}


@pytest.mark.parametrize("side", ["none", "left", "right", "both", "between"])
@pytest.mark.parametrize("name", MODELS)
def test_weights(name, side, request):
    model, mask = MODELS[name](), lengths_mask(side, 3, 30)
    inputs, kept = inputs_of(model, 3, 30, mask), kept_by(mask, 3, 30)
    actual = accelerated(model)(**inputs, output_attentions=True)
    if name.startswith("falcon"):
        model.set_attn_implementation("eager")
        request.getfixturevalue("falcon_adds_its_bias_once")
    expected = model(**inputs, output_attentions=True)
    assert_same_model(actual.logits[kept], expected.logits[kept], "logits")
    actual, expected = weights_of(actual), weights_of(expected)
    assert len(expected) == (3 if model.config.is_encoder_decoder else 1)
    if name == "longt5":
        # Its encoder, which is not accelerated, returns them by blocks.
        of_encoder = expected.pop("encoder_attentions")
        assert all(map(torch.equal, actual["encoder_attentions"], of_encoder))
    for kind, layers in expected.items():
        for layer in zip(actual[kind], layers, strict=True):
            assert_same_model(*(x.transpose(1, 2)[kept] for x in layer), kind)


@pytest.mark.parametrize("make", [bloom, mpt, inkling2, mpnet, t5])
def test_gradients_of_weights(make):
    model = make()
    inputs, gradients = inputs_of(model, 2, 20, lengths_mask("left", 2, 20)), []
    kept = kept_by(inputs["attention_mask"], 2, 20)
    for m in (accelerated(model), model):
        result = m(**inputs, output_attentions=True)
        weights = [x for layers in weights_of(result).values() for x in layers]
        sum(x.transpose(1, 2)[kept].square().sum() for x in weights).backward()
        gradients.append({name: p.grad for name, p in m.named_parameters() if p.grad is not None})
    actual, expected = gradients
    largest = torch.stack([x.abs().max() for x in expected.values()])
    for name, gradient in expected.items():
        assert_same_model(actual[name], gradient, f"gradient of {name}", largest)


@pytest.mark.parametrize("make", [bloom, mpt, inkling2, mpnet, t5])
def test_a_config_may_ask_for_weights(make):
    model = make(output_attentions=True)
    inputs = inputs_of(model, 2, 20)
    actual, expected = (weights_of(m(**inputs)) for m in (accelerated(model), model))
    for kind, layers in expected.items():
        for layer in zip(actual[kind], layers, strict=True):
            assert_same_model(*layer, kind)
    assert not weights_of(accelerated(model)(**inputs, output_attentions=False))


@pytest.mark.parametrize("make", [bloom, inkling2, t5])
def test_queries_that_see_no_key_have_no_weights(make):
    """There is padding before the first token and between others."""
    model, mask = accelerated(make()), lengths_mask("between", 3, 20)
    mask[1, :4] = 0
    result = model(**inputs_of(model, 3, 20, mask), output_attentions=True)
    weights = result["decoder_attentions" if make is t5 else "attentions"]
    for layer in weights:
        assert not layer[1, :, :4].any()
    sum(layer.square().sum() for layer in weights).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("make", [bloom, t5])
def test_weights_of_generated_tokens(make):
    model, ids = make(), tokens(2, 9)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options |= {"output_attentions": True, "output_logits": True, "return_dict_in_generate": True}
    actual, expected = (m.generate(ids, **options) for m in (accelerated(model), model))
    assert_same_steps(actual, expected)
    same = (actual.sequences == expected.sequences).all(1)  # no tie led to other tokens
    kind = "decoder_attentions" if make is t5 else "attentions"
    for step in zip(actual[kind], expected[kind], strict=True):
        for layer in zip(*step, strict=True):
            assert_same_model(*(x[same] for x in layer), kind)
