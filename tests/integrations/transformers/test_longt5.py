"""LongT5's encoders: nearby tokens, and sums of blocks of tokens."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from transformers.models.longt5 import modeling_longt5

from tests.integrations.transformers.cases import (
    accelerate,
    accelerated,
    assert_closer_to_float32,
    inputs_of,
    kept_by,
    lengths_mask,
    t5,
    tokens,
    unaccelerate,
    with_adapters,
)
from tests.integrations.transformers.test_generation import assert_same_steps, generate, inputs_for
from tests.integrations.transformers.test_memory import MEASURE
from tests.integrations.transformers.test_unaccelerate import state_of
from tests.support.allocations import output_of
from tests.support.numerics import assert_same_model

KINDS = ["local", "transient-global"]
SIDES = ["none", "left", "right", "both", "between"]


def longt5(kind: str, layers: int = 2, **config):
    """The radius is shorter than most inputs, and no multiple of the size of blocks."""
    shape = {"local_radius": 10, "global_block_size": 8, **config}
    return t5("LongT5", layers=layers, encoder_attention_type=kind, **shape)


def differentiated(encoder, ids, mask) -> tuple[torch.Tensor, dict]:
    """Hidden states of tokens and all gradients; 0 where there is none, in short inputs."""
    states = encoder(ids, attention_mask=mask).last_hidden_state[kept_by(mask, *ids.shape)]
    states.backward(torch.randn(states.shape, generator=torch.Generator().manual_seed(0)))
    named = encoder.named_parameters()
    return states, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}


def assert_same_encoder(encoder, ids, mask) -> None:
    ours = accelerated(encoder)
    (actual, gradients), (states, expected) = (
        differentiated(model, ids, mask) for model in (ours, encoder)
    )
    assert_same_model(actual, states, "hidden states")
    # With a single token, gradients of queries and keys are 0 up to rounding.
    alone = torch.cat([x.flatten() for x in expected.values()]) if ids.shape[1] == 1 else None
    for name, gradient in expected.items():
        assert_same_model(gradients[name], gradient, f"gradient of {name}", alone)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_tables_take_part(kind):
    assert_same_encoder(with_adapters(longt5(kind).encoder), tokens(2, 63), None)


@pytest.mark.parametrize("length", [17, 63, 130])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", KINDS)
def test_encoder_and_its_gradients(kind, side, length):
    assert_same_encoder(longt5(kind).encoder, tokens(3, length), lengths_mask(side, 3, length))


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_shorter_than_a_block(kind, length):
    assert_same_encoder(longt5(kind).encoder, tokens(3, length), None)


@pytest.mark.parametrize("size", [16, 25])
def test_blocks_that_transformers_rounds(size):
    """It rounds the ends of blocks of 25, from token 425 on."""
    encoder = longt5("transient-global", layers=1, global_block_size=size).encoder
    assert_same_encoder(encoder, tokens(1, 450), None)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_are_shorter_than_a_block(kind):
    mask = torch.ones(3, 40).long()
    mask[1, 5:], mask[2, :36] = 0, 0
    assert_same_encoder(longt5(kind).encoder, tokens(3, 40), mask)


@pytest.mark.parametrize("side", ["left", "between"])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_weights_are_those_of_blocks(kind, side):
    model, mask = longt5(kind), lengths_mask(side, 3, 40)
    inputs = inputs_of(model, 3, 40, mask) | {"output_attentions": True}
    actual, expected = (m(**inputs).encoder_attentions for m in (accelerated(model), model))
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("kind", KINDS)
def test_own_attention_is_not_called(kind, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("blocks were computed")

    monkeypatch.setattr(modeling_longt5, "_concatenate_3_blocks", fail)
    monkeypatch.setattr(modeling_longt5, "_create_global_aggregates", fail)
    monkeypatch.setattr(modeling_longt5, "_get_local_attention_mask", blocks_of_tokens)
    encoder = longt5(kind).encoder
    with pytest.raises(AssertionError, match="blocks"):
        encoder(tokens(3, 40))
    accelerate(encoder)
    for side in ("none", "left", "right", "both"):
        mask = lengths_mask(side, 3, 40)
        encoder(tokens(3, 40), attention_mask=mask).last_hidden_state.sum().backward()


def blocks_of_tokens(mask, block_len, device):
    """A mask in which tokens see only themselves."""
    blocks = torch.nn.functional.pad(mask, (0, -mask.shape[1] % block_len))
    own = torch.diag_embed(blocks.unflatten(1, (-1, block_len)).bool())
    return torch.nn.functional.pad(own, (block_len, block_len))[:, None]


@pytest.mark.parametrize("kind", KINDS)
def test_nan_of_padding_does_not_spread(kind):
    encoder, mask = accelerated(longt5(kind).encoder), lengths_mask("left", 3, 70)
    embedded = torch.randn(3, 70, 64)
    embedded[mask == 0] = torch.nan
    states = encoder(inputs_embeds=embedded, attention_mask=mask).last_hidden_state
    assert states[mask.bool()].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_one_mask_for_all_texts(kind):
    """The model's own attention broadcasts it."""
    model, mask, ids = longt5(kind).encoder, lengths_mask("left", 3, 30)[1:2], tokens(3, 30)
    actual, expected = (m(ids, mask).last_hidden_state for m in (accelerated(model), model))
    assert_same_model(actual[:, mask[0].bool()], expected[:, mask[0].bool()], "hidden states")


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_results_are_closer_to_float32(kind):
    encoder = longt5(kind, layers=1, initializer_factor=2.0).encoder
    assert_closer_to_float32(encoder, {"input_ids": tokens(2, 500)})


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_generation(kind, beams):
    model, inputs = longt5(kind), inputs_for("longt5", "right")
    options = {"max_new_tokens": 48, "num_beams": beams, "output_scores": beams > 1}
    actual, expected = (generate(m, inputs, **options) for m in (accelerated(model), model))
    if beams == 1:
        assert_same_steps(actual, expected)
    else:
        scale = torch.stack(expected.logits)
        assert_same_model(actual.sequences_scores, expected.sequences_scores, "scores", scale)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing(kind, reentrant):
    ours = accelerated(longt5(kind, layers=3, dropout_rate=0.0).encoder).train()
    checkpointed = copy.deepcopy(ours)
    checkpointed.activation_checkpointing_enable({"use_reentrant": reentrant})
    embedded, cotangent = torch.randn(2, 40, 64, requires_grad=True), torch.randn(2, 40, 64)
    for encoder in (ours, checkpointed):
        encoder(inputs_embeds=embedded).last_hidden_state.backward(cotangent)
    for (name, p), q in zip(ours.named_parameters(), checkpointed.parameters(), strict=True):
        if p.grad is not None:
            assert_same_model(q.grad, p.grad, f"gradient of {name}")


@pytest.mark.parametrize("kind", KINDS)
def test_unaccelerate(kind):
    model = longt5(kind)
    before, inputs = state_of(model), inputs_of(model, 2, 20)
    expected = model(**inputs).logits
    assert state_of(accelerate(model)) != before
    assert state_of(unaccelerate(model)) == before
    assert torch.equal(model(**inputs).logits, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_refused_in_training(kind):
    with pytest.raises(NotImplementedError, match=r"attention dropout is 0\.1"):
        accelerated(longt5(kind).encoder).train()(tokens(2, 20))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="preloads a library")
@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_linear_in_the_tokens(kind, tmp_path):
    """Logits of blocks of two heads of 8192 tokens would take 32 MiB."""
    config = f"heads=2, d_kv=32, dropout_rate=0.0, encoder_attention_type={kind!r}"
    measure = MEASURE.replace("{make}", f"t5('LongT5', {config}, local_radius=15)")
    measure = measure.replace("{padding}", ":100").replace("2048), peak(4096)", "4096), peak(8192)")
    short, long = map(float, output_of(measure, tmp_path).split())
    assert long <= 2.1 * short
