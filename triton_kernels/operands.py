"""What kernels are given: addresses with their strides, the problem's sizes, and its bias."""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor


class Rows(NamedTuple):
    """A (batch, heads, sequence, channels) or (batch, heads, sequence) tensor.

    The last dimension is contiguous. Strides count elements; 0 broadcasts.
    """

    start: Tensor
    batch: int
    head: int
    row: int


class Problem(NamedTuple):
    """Sizes and mask; query i stands at position i + n_key - n_query and sees keys of forms.py."""

    heads: int
    group: int  # query heads that share a key head
    n_query: int
    n_key: int
    window: int
    scale: float
    scale_in_base_2: float
    head_dim: tl.constexpr
    value_dim: tl.constexpr
    causal: tl.constexpr
    windowed: tl.constexpr
    positive_scale: tl.constexpr


class Bias(NamedTuple):
    """A form of forms.py: "none", "linear", "distance" or "cumulative".

    terms: slopes, the table in base 2, or float64 sums. squared: the bias is -log(1 + beta^2).
    factored: tiles that are not masked take it as factors.py says, with key_factors or
    query_factors in memory where the kernel reads them.
    """

    form: tl.constexpr
    squared: tl.constexpr
    factored: tl.constexpr
    terms: Rows | None
    gain: Rows | None
    key_factors: Rows | None
    query_factors: Rows | None


def rows(x: Tensor) -> Rows:
    """x (B, H, N, D), (B, H, N) or (B, H)."""
    return Rows(x, *x.stride()[:2], x.stride(2) if x.dim() > 2 else 1)
