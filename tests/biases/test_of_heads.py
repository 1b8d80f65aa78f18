"""Some heads of a bias equal those of the whole bias."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from biased_flash_attn import biased_flash_attn, biases
from biased_flash_attn.biases import of_heads
from biased_flash_attn.biases.distance import PositionBias
from biased_flash_attn.forms import Cumulative

HEADS = 6


@pytest.mark.parametrize("name", biases.POSITION_BIASES)
def test_heads_of_a_position_bias(name):
    bias = biases.POSITION_BIASES[name](HEADS)
    some = of_heads(bias, 2, 5)
    assert some.num_heads == 3
    assert torch.equal(some.dense(7, 9), bias.dense(7, 9)[2:5])
    assert torch.equal(some.receptive_field(0.1), bias.receptive_field(0.1)[2:5])


class Tokens(PositionBias):
    """A custom bias of one step per token, shared by all sequences."""

    def __init__(self, values: Tensor, gain: Tensor | None):
        super().__init__(values.shape[0])
        self.values, self.gain = values[None], gain

    def lower(self, geometry, dtype, device):
        gain = None if self.gain is None else self.gain.to(dtype)
        return Cumulative(geometry.prefix_sums(self.values), gain)


@pytest.mark.parametrize("gain", [None, torch.rand(1, HEADS, 9), torch.rand(1, 1, 9)])
def test_heads_of_a_custom_position_bias(gain):
    bias = Tokens(torch.randn(HEADS, 9), gain)
    some = of_heads(bias, 2, 5)
    assert torch.equal(some.dense(9, 9), bias.dense(9, 9)[2:5])
    q, k, v = torch.randn(3, 1, HEADS, 9, 8)
    whole = biased_flash_attn(q, k, v, bias)
    q, k, v = (x[:, 2:5] for x in (q, k, v))
    torch.testing.assert_close(biased_flash_attn(q, k, v, some), whole[:, 2:5])


@pytest.mark.parametrize("name", ["alibi", "kerple_log", "shared", "cable", "forget_gate"])
def test_groups_of_heads_equal_all_heads(name):
    """Also in the gradients of parameters, which groups share."""
    q, k, v = torch.randn(3, 2, HEADS, 20, 8, dtype=torch.float64)
    states = torch.randn(2, 20, 5, dtype=torch.float64)
    if name in biases.CONTEXT_BIASES:
        module = biases.CONTEXT_BIASES[name](5, HEADS).double()
        called = module(states)
    elif name == "shared":
        module = called = biases.DistanceBias.from_function(torch.nn.Softplus(), HEADS)
    else:
        settings = {"trainable": True} if name == "alibi" else {}
        module = called = biases.POSITION_BIASES[name](HEADS, **settings).double()
    parameters = list(module.parameters())
    whole = biased_flash_attn(q, k, v, called)
    groups = [(0, 1), (1, 4), (4, 6)]
    parts = [
        biased_flash_attn(*(x[:, a:b] for x in (q, k, v)), of_heads(called, a, b))
        for a, b in groups
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    if parameters:
        weights = torch.randn_like(whole)
        ours, exact = (
            torch.autograd.grad((o * weights).sum(), parameters, retain_graph=True)
            for o in (torch.cat(parts, 1), whole)
        )
        for one, other in zip(ours, exact, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["xl", "disentangled", "shaw"])
def test_heads_of_a_relative_bias(name):
    q, k = torch.randn(2, 2, HEADS, 9, 4)
    bias = {
        "xl": lambda: biases.TransformerXL(HEADS, 4)(q=q),
        "disentangled": lambda: biases.Disentangled(8, HEADS, 4, max_distance=3)(q=q, k=k),
        "shaw": lambda: biases.Shaw(HEADS, 4)(q=q),
    }[name]()
    some = of_heads(bias, 2, 5)
    assert some.num_heads == 3
    torch.testing.assert_close(some.dense(9, 9), bias.dense(9, 9)[:, 2:5])


def test_errors_name_the_argument():
    with pytest.raises(TypeError, match=r"bias is a Cable; .* a CumulativeBias or a RelativeBias"):
        of_heads(biases.Cable(5, HEADS), 0, 2)
    for start, stop in ((2, 2), (-1, 2), (3, 7)):
        with pytest.raises(ValueError, match=f"start and stop are {start} and {stop}; they must"):
            of_heads(biases.ALiBi(HEADS), start, stop)
