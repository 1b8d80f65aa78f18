"""Results and gradients of every bias do not depend on the scheduling of threads."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from biased_flash_attn import biased_flash_attn, biases

HEADS, HEAD_DIM, N = 16, 4, 1100
DIM = HEADS * HEAD_DIM
# Those that need more than a number of heads, and variants that read a table in other ways.
MAKERS: dict[str, Callable[[], biases.Bias]] = {
    **{name: functools.partial(make, HEADS) for name, make in biases.POSITION_BIASES.items()},
    **{name: functools.partial(make, DIM, HEADS) for name, make in biases.CONTEXT_BIASES.items()},
    "banded_relative": lambda: biases.BandedRelative(DIM, HEADS),
    "disentangled": lambda: biases.Disentangled(DIM, HEADS),
    "disentangled-buckets": lambda: biases.Disentangled(DIM, HEADS, buckets=32),
    "gated_table": lambda: biases.GatedTable(DIM, HEADS),
    "shaw": lambda: biases.Shaw(HEADS, HEAD_DIM),
    "t5-both": lambda: biases.T5(HEADS, bidirectional=True),
    "transformer_xl": lambda: biases.TransformerXL(HEADS, HEAD_DIM),
    "transformer_xl-table": lambda: biases.TransformerXL(HEADS, HEAD_DIM, max_distance=300),
}


def test_every_bias_is_listed():
    assert biases.NAMED.keys() <= MAKERS.keys()


@pytest.mark.parametrize("name", MAKERS)
def test_bias_is_repeatable_with_more_threads_than_cores(name):
    torch.set_num_threads(5)
    bias = MAKERS[name]()
    x = torch.randn(1, N, DIM, requires_grad=True)
    q, k, v = (torch.randn(1, HEADS, N, HEAD_DIM, requires_grad=True) for _ in range(3))
    grad_o = torch.randn(1, HEADS, N, HEAD_DIM)
    leaves = {"x": x, "q": q, "k": k, "v": v, **dict(bias.named_parameters())}

    def results() -> dict[str, Tensor]:
        called = bias(x, q, k)
        o = biased_flash_attn(
            bias.queries(q), k, v, called, causal=False, scale=bias.scale, backend="cpu"
        )
        grads = torch.autograd.grad(o, leaves.values(), grad_o, materialize_grads=True)
        return {"o": o, **dict(zip(leaves, grads, strict=True))}

    first = results()
    for _ in range(3):
        for what, x_again in results().items():
            assert torch.equal(x_again, first[what]), what
