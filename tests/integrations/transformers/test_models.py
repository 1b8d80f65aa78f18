"""Models of transformers have the same results if they run on this package."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.integrations.transformers.cases import (
    DECODERS,
    ENCODER_DECODERS,
    INKLINGS,
    accelerated,
    assert_closer_to_float32,
    bloom,
    differentiated,
    falcon,
    inkling,
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


def assert_same_training(model, inputs: dict, kept: torch.Tensor) -> None:
    ours = accelerated(model)
    logits, gradients = differentiated(ours, inputs, kept)
    expected, expected_gradients = differentiated(model, inputs, kept)
    assert_same_model(logits, expected, "logits")
    assert gradients.keys() == expected_gradients.keys()
    largest = torch.stack([x.abs().max() for x in expected_gradients.values() if x is not None])
    for name, gradient in expected_gradients.items():
        if gradient is None:
            assert gradients[name] is None, name
        else:
            # The gradient of a single number is a sum over all tokens, whose terms cancel, as are
            # those of a vector that is added to all keys and does not change the weights.
            cancels = gradient.numel() == 1 or name.endswith("attn.k.bias")
            made_of = largest if cancels else None
            assert_same_model(gradients[name], gradient, f"gradient of {name}", made_of)


@pytest.mark.parametrize("side", ["none", "left", "right", "both", "between"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoder_and_its_gradients(name, side):
    model, mask = DECODERS[name](), lengths_mask(side, 3, 70)
    assert_same_training(model, inputs_of(model, 3, 70, mask), kept_by(mask, 3, 70))


@pytest.mark.parametrize("side", ["none", "left", "right", "both", "between"])
@pytest.mark.parametrize("name", INKLINGS)
def test_inkling_and_its_gradients(name, side):
    model, mask = INKLINGS[name](), lengths_mask(side, 3, 70)
    assert_same_training(model, inputs_of(model, 3, 70, mask), kept_by(mask, 3, 70))


@pytest.mark.parametrize("name", ["bloom, 12 heads", "mpt, 6 heads", "falcon, 12 heads"])
def test_decoder_at_distances_that_bfloat16_rounds(name):
    inputs = {"input_ids": tokens(1, 400)}
    assert_same_training(DECODERS[name](layers=1), inputs, torch.ones(1, 400, dtype=torch.bool))


@pytest.mark.parametrize("side", ["none", "left", "right", "both", "between"])
@pytest.mark.parametrize("layers", [1, 3])
def test_mpnet_and_its_gradients(layers, side):
    """Distances reach both the exact and the logarithmic buckets on both sides."""
    model, mask = mpnet(layers=layers), lengths_mask(side, 3, 200)
    assert_same_training(model, inputs_of(model, 3, 200, mask), kept_by(mask, 3, 200))


@pytest.mark.parametrize("side", ["none", "left", "right", "both", "between"])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_encoder_decoder_and_its_gradients(name, side):
    """Both sides are longer than the largest distance with a separate bucket."""
    decoder_mask = lengths_mask(side, 3, 150)
    inputs = {
        "input_ids": tokens(3, 200),
        "attention_mask": lengths_mask(side, 3, 200),
        "decoder_input_ids": tokens(3, 150),
        "decoder_attention_mask": decoder_mask,
    }
    assert_same_training(ENCODER_DECODERS[name](), inputs, kept_by(decoder_mask, 3, 150))


BUCKETS = {"relative_attention_num_buckets": 10, "relative_attention_max_distance": 20}


@pytest.mark.parametrize(
    "make",
    [
        lambda: bloom(apply_residual_connection_post_layernorm=True),
        lambda: mpt(attn_config={"clip_qkv": 0.5}),
        lambda: mpt(attn_config={"softmax_scale": 0.7}),
        lambda: falcon(bias=True, parallel_attn=True),
        *(lambda family=family: t5(family, **BUCKETS) for family in ("T5", "MT5", "UMT5")),
    ],
    ids=["bloom", "mpt, clipped", "mpt, scaled", "falcon", "t5", "mt5", "umt5"],
)
def test_settings(make):
    model, inputs = make(), {"input_ids": tokens(2, 40)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens(2, 40)
    assert_same_training(model, inputs, torch.ones(2, 40, dtype=torch.bool))


@pytest.mark.parametrize("make", [bloom, falcon])
def test_dropout_outside_of_attention(make):
    """The same random numbers are drawn."""
    model, ids = make(hidden_dropout=0.2).train(), tokens(2, 20)
    results = []
    for m in (accelerated(model), model):
        torch.manual_seed(0)
        results.append(m(ids).logits)
    assert_same_model(*results, "logits")


@pytest.mark.parametrize("name", [*DECODERS, *INKLINGS, *ENCODER_DECODERS, "mpnet"])
def test_acceleration_does_not_affect_initialization(name):
    plain = (DECODERS | INKLINGS | ENCODER_DECODERS | {"mpnet": mpnet})[name]()
    ours = accelerated(plain)
    for model in (plain, ours):
        for parameter in model.parameters():  # transformers marks initialized parameters
            vars(parameter).pop("_is_hf_initialized", None)
            parameter.data.zero_()
        torch.manual_seed(0)
        model.apply(model._init_weights)
    assert all(x.any() for name, x in plain.state_dict().items() if name.endswith("q.weight"))
    for mine, theirs in zip(ours.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("length", [20, 50, 90])
def test_cross_attention_with_padding_between_tokens(length):
    """A decoder's input may come from any encoder."""
    model = t5().decoder
    inputs = {
        "input_ids": tokens(3, length),
        "encoder_hidden_states": torch.randn(3, 50, 64),
        "encoder_attention_mask": lengths_mask("between", 3, 50),
    }
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        assert_same_model(accelerated(model)(**inputs).last_hidden_state, expected, "hidden states")


@pytest.mark.parametrize("name", ["bloom", "t5", "umt5", "inkling", "inkling 2"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(name, reentrant):
    """Recomputed blocks share the bias that the first one computes."""
    model = (DECODERS | INKLINGS | ENCODER_DECODERS)[name](layers=3)
    ours, checkpointed = accelerated(model), accelerated(model)
    checkpointed.activation_checkpointing_enable({"use_reentrant": reentrant})
    inputs = {"input_ids": tokens(2, 40)}
    if name in ENCODER_DECODERS:
        inputs["decoder_input_ids"] = tokens(2, 30)
    for m in (ours, checkpointed):
        m.train()
        for module in m.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            if isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
    kept = torch.ones(2, 30 if name in ENCODER_DECODERS else 40, dtype=torch.bool)
    _, expected = differentiated(ours, inputs, kept)
    inputs = {**inputs, "use_cache": False}
    _, gradients = differentiated(checkpointed, inputs, kept)
    for key, gradient in expected.items():
        assert_same_model(gradients[key], gradient, f"gradient of {key}")


def falcon_dominated_by_bias():
    """A model whose q.k are small compared to the bias, which transformers rounds to bfloat16."""
    model = falcon(heads=4, layers=1, head_dim=32, initializer_range=0.3)
    with torch.no_grad():
        weight = model.transformer.h[0].self_attention.query_key_value.weight
        weight.unflatten(0, (4, 3, 32))[:, :2] *= 0.1
    return model.transformer


@pytest.mark.parametrize(
    "make",
    [
        lambda: bloom(layers=1).transformer,
        lambda: mpt(layers=1, initializer_range=0.3).transformer,
        falcon_dominated_by_bias,
        lambda: t5(layers=1, initializer_factor=2.0).encoder,
        lambda: t5("MT5", layers=1, initializer_factor=2.0).encoder,
        lambda: t5("UMT5", layers=1, initializer_factor=2.0).encoder,
        lambda: t5("SwitchTransformers", layers=1, initializer_factor=2.0, num_experts=1).encoder,
        lambda: t5("Pop2Piano", layers=1, initializer_factor=2.0, dense_act_fn="gelu_new").encoder,
        lambda: inkling(layers=1, initializer_range=0.3).model,
        lambda: inkling2(layers=1, initializer_range=0.3).model,
        lambda: mpnet(layers=1).mpnet,
    ],
    ids=[
        *("bloom", "mpt", "falcon", "t5", "mt5", "umt5", "switch", "pop2piano"),
        *("inkling", "inkling 2", "mpnet"),
    ],
)
def test_bfloat16_results_are_closer_to_float32(make):
    """Errors are summed over so many entries that their ratio hardly varies between draws: it is
    0.91 to 0.94 for Inkling 2, and smaller for the others."""
    assert_closer_to_float32(make(), {"input_ids": tokens(2, 500)})


def test_cast_after_acceleration():
    """Slopes that are inexact in bfloat16 are not rounded with the parameters."""
    model = bloom(12)
    inputs = {"input_ids": tokens(2, 300)}
    with torch.no_grad():
        before = accelerated(copy.deepcopy(model).bfloat16())(**inputs).logits
        after = accelerated(model).bfloat16()(**inputs).logits
    assert torch.equal(before, after)


def test_autocast():
    model = bloom()
    inputs = {"input_ids": tokens(2, 100)}
    with torch.no_grad():
        exact = model(**inputs).logits
        with torch.autocast("cpu", torch.bfloat16):
            errors = [(m(**inputs).logits - exact).norm() for m in (accelerated(model), model)]
    assert errors[0] < errors[1]
