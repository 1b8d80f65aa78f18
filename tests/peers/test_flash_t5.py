"""flashT5, tests/fa2_triton/test_fa2_bias.py: a dense bias, also broadcast, with its gradient."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from biased_flash_attn import biased_flash_attn, biases

from .oracle import assert_within, attention, below_diagonal

PEER = ("flashT5", "tests/fa2_triton/test_fa2_bias.py")


@dataclass(frozen=True)
class Case:
    sizes: tuple[int, int, int, int, int]  # batch, heads, queries, keys, head_dim
    causal: bool
    dtype: torch.dtype
    backward: bool
    refused: str = ""

    def __str__(self) -> str:
        sizes, dtype = "x".join(map(str, self.sizes)), str(self.dtype).removeprefix("torch.")
        kind = "backward" if self.backward else "forward"
        return f"{kind}-{sizes}-{dtype}-{'causal' if self.causal else 'both'}"


CASES = [
    Case(sizes, causal, dtype, backward)
    for sizes in ((2, 4, 512, 612, 128), (2, 4, 1024, 1045, 64))
    for causal in (True, False)
    for dtype, backward in (
        (torch.float16, False),
        (torch.bfloat16, False),
        (torch.float16, True),
    )
]


# The larger ones take two seconds each.
MARKED = [pytest.param(x, marks=[pytest.mark.slow] * (x.sizes[2] > 512)) for x in CASES]


@pytest.mark.parametrize("case", MARKED, ids=str)
def test_dense_biases(case):
    """The bias has every dimension in the forward pass, and is shared by batch and heads in the
    backward pass. Logits are not scaled, and the last query is aligned with the last key."""
    batch, heads, n_query, n_key, dim = case.sizes
    shared = (1, 1) if case.backward else (batch, heads)
    shapes = [(batch, heads, n, dim) for n in (n_query, n_key, n_key)]
    inputs = [torch.randn(shape).to(case.dtype) for shape in [*shapes, (*shared, n_query, n_key)]]
    mask = below_diagonal(n_query, n_key, n_key - n_query if case.causal else n_key)

    def naive(q, k, v, bias):
        return attention(q, k, v, bias + mask, scale=1.0)

    def ours(q, k, v, bias):
        dense = biases.DenseBias(bias)
        return biased_flash_attn(q, k, v, dense, causal=case.causal, scale=1.0)

    assert_within(ours, naive, inputs, factor=2, atol=1e-5, gradients=case.backward)
