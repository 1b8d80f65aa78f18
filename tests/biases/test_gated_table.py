"""WavLM's table of buckets, multiplied by a gate of each query."""

from __future__ import annotations

import pytest
import torch
from transformers.models import wavlm

from biased_flash_attn.biases import GatedTable
from tests.biases.relative_cases import (
    REFERENCE,
    assert_same_results,
    attended,
    drawn,
    named,
    randomized,
)
from tests.support.oracles import t5_bucket

HEADS, HEAD_DIM = 3, 4
DIM = HEADS * HEAD_DIM


def by_pairs(bias: GatedTable, x: torch.Tensor) -> torch.Tensor:
    """The gates of the paper (section 3.1) and the table, one pair at a time."""
    n, table = x.shape[1], bias.table
    linear = bias.gate(x.unflatten(-1, (HEADS, HEAD_DIM)))
    # The code's first gate is one minus the paper's, which changes only the sign of weights.
    g_update = 1 - torch.sigmoid(linear[..., :4].sum(-1))
    g_reset = torch.sigmoid(linear[..., 4:].sum(-1))
    dense = []
    for i in range(n):
        for j in range(n):
            d = table.r[:, t5_bucket(j - i, True, table.num_buckets, table.max_distance)]
            scaled = bias.c * g_reset[:, i] * d
            dense.append(d + g_update[:, i] * d + (1 - g_update[:, i]) * scaled)
    return torch.stack(dense, -1).unflatten(-1, (n, n))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("buckets", [(8, 5), (16, 9), (320, 800)])
def test_results_equal_the_pairwise_definition(buckets, causal):
    bias = randomized(GatedTable(DIM, HEADS, *buckets))
    x, q, k, v = drawn(2, 14, DIM), *(drawn(2, HEADS, 14, HEAD_DIM) for _ in range(3))
    assert_same_results(
        lambda: REFERENCE(q, k, v, bias(x), causal=causal),
        lambda: attended(q, k, v, by_pairs(bias, x), causal, HEAD_DIM**-0.5),
        named(bias, x=x, q=q, k=k, v=v),
    )


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask")
def test_equals_the_layers_of_wavlm():
    """The first layer, which has the table, and another one, to which it is passed."""
    first, second = (
        randomized(wavlm.modeling_wavlm.WavLMAttention(DIM, HEADS, 0.0, 16, 9, has_table))
        for has_table in (True, False)
    )
    x = drawn(2, 14, DIM)
    mask = torch.ones(2, 14, dtype=torch.bool)
    mask[1, 11:] = False

    def ours():
        y = x
        for layer in (first, second):
            bias = GatedTable(DIM, HEADS, 16, 9)
            bias.gate = layer.gru_rel_pos_linear
            # Views of the layers' parameters, so that they receive the gradients.
            del bias.c, bias.table.r
            bias.c = layer.gru_rel_pos_const.flatten()
            bias.table.r = first.rel_attn_embed.weight.mT
            linears = layer.q_proj, layer.k_proj, layer.v_proj
            q, k, v = (f(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in linears)
            o = REFERENCE(q, k, v, bias(y), causal=False, key_padding_mask=mask)
            y = layer.out_proj(o.transpose(1, 2).flatten(2)) * mask[..., None]
        return y

    def exact():
        y, bias = x, None
        for layer in (first, second):
            y, _, bias = layer(y, attention_mask=mask.long(), position_bias=bias)
            y = y * mask[..., None]
        return y

    assert_same_results(ours, exact, named(first, second, x=x))


def test_buckets_are_those_of_transformers():
    bias, layer = GatedTable(8, 2), wavlm.modeling_wavlm.WavLMAttention(8, 2)
    d = torch.arange(-2000, 2001)
    assert torch.equal(bias.table.bucket(d.double()), layer._relative_positions_bucket(-d))


def test_initial_values_are_those_of_the_authors():
    bias = GatedTable(64, 4)
    shapes = {name: tuple(x.shape) for name, x in bias.state_dict().items()}
    assert shapes == {"c": (4,), "table.r": (4, 320), "gate.weight": (8, 16), "gate.bias": (8,)}
    assert (bias.c == 1).all()
    assert bias.table.r.std().item() == pytest.approx((2 / 324) ** 0.5, rel=0.2)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: GatedTable(10, 4), ValueError, "dim is 10; it must be a multiple of num_heads, 4"),
        (lambda: GatedTable(8, 2, 7), ValueError, "num_buckets must be even and at least 4"),
        (lambda: GatedTable(8, 2, 8, 1), ValueError, "max_distance must exceed 2"),
        (lambda: GatedTable(8, 2)(torch.ones(1, 5, 7)), ValueError, r"x has shape \(1, 5, 7\)"),
    ],
)
def test_errors_name_the_argument(make, error, message):
    with pytest.raises(error, match=message):
        make()
