"""The logits of a tile in base 2: scale, bias, change of base and mask, always in this order."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..bias.tile import pairs_of
from ..primitives import INFINITY, dot, visible


class Logits(NamedTuple):
    """Logits in base 2, x * multiplier, and the visibility mask. Where the bias has factors, an
    offset per query is missing from x."""

    x: tl.tensor
    multiplier: tl.tensor
    sees: tl.tensor


@triton.jit
def tile_logits(
    head,
    tile_q,
    tile_k,
    queries,
    keys,
    initial,
    MASKED: tl.constexpr,
    FACTORED: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):
    """Returns the Logits of a tile. x is [BLOCK_M, BLOCK_N], or its transpose with KEYS_FIRST.

    initial: the accumulator that q k^T is added to: the product of the factors, or zeros.
    """
    multiplier, sees = head.problem.scale_in_base_2, True
    if KEYS_FIRST:
        x = dot(tile_k, tl.trans(tile_q), initial)
    else:
        x = dot(tile_q, tl.trans(tile_k), initial)
    HAS_BIAS: tl.constexpr = head.bias.form.tile_bias is not None
    if not FACTORED and (MASKED or HAS_BIAS or not head.problem.positive_scale):
        pairs = pairs_of(head, queries, keys, KEYS_FIRST)
        if MASKED:
            sees = visible(head.problem, pairs.p, pairs.j, queries.first_key, queries.end_key)
        values = 0.0
        if HAS_BIAS:
            values = head.bias.form.tile_bias(head, queries, keys, pairs, sees, KEYS_FIRST)
        x = x * multiplier + values
        multiplier = 1.0
        if MASKED:
            x = tl.where(sees, x, -INFINITY)
    return Logits(x, multiplier, sees)
