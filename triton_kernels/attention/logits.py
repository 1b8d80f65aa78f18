"""The logits of a tile in base 2: scale, bias, change of base and mask, always in this order."""

from __future__ import annotations

import triton
import triton.language as tl

from ..bias.tile import load_prefix_sums, pairs, tile_bias
from ..primitives import INFINITY, dot, plan_range, position, visible


@triton.jit
def query_side(bias, problem, b, h, first, gain, BLOCK_M: tl.constexpr):
    """Returns, for BLOCK_M queries with the given gains: the position of the first query, the
    gains, C[p], and the key range [first_key, end_key) of the plan."""
    p_first = position(problem, first)
    sums = load_prefix_sums(bias, problem, b, h, p_first, BLOCK_M)
    first_key, end_key = plan_range(problem, b, h, first)
    return p_first, gain, sums, first_key, end_key


@triton.jit
def key_side(bias, problem, b, h, first, BLOCK_N: tl.constexpr):
    """Returns, for BLOCK_N keys, the position of the first key, and C[j]."""
    return first, load_prefix_sums(bias, problem, b, h, first, BLOCK_N)


@triton.jit
def tile_logits(
    bias,
    problem,
    b,
    h,
    tile_q,
    tile_k,
    queries,
    keys,
    initial,
    MASKED: tl.constexpr,
    FACTORED: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):
    """Returns x, multiplier and the visibility mask. The logits in base 2 are x * multiplier; if
    FACTORED, an offset per query is missing from them.

    initial: the accumulator that q k^T is added to: the product of the factors, or zeros. x and
    initial are [BLOCK_M, BLOCK_N], or the transpose with KEYS_FIRST.
    """
    multiplier, sees = problem.scale_in_base_2, True
    if KEYS_FIRST:
        x = dot(tile_k, tl.trans(tile_q), initial)
    else:
        x = dot(tile_q, tl.trans(tile_k), initial)
    if not FACTORED and (MASKED or bias.exists or not problem.positive_scale):
        tile_pairs = pairs(bias, queries, keys, KEYS_FIRST)
        if MASKED:
            sees = visible(problem, tile_pairs[0], tile_pairs[1], queries[3], queries[4])
        values = tile_bias(bias, problem, b, h, queries, keys, tile_pairs, sees, KEYS_FIRST)
        x = x * multiplier + values
        if MASKED:
            x = tl.where(sees, x, -INFINITY)
        multiplier = 1.0
    return x, multiplier, sees
