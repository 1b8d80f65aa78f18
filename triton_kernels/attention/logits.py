"""The logits of a tile in base 2: scale, bias, change of base and mask, always in this order."""

from __future__ import annotations

import triton
import triton.language as tl

from ..bias.relative import relative_bias
from ..bias.tile import load_prefix_sums, tile_bias
from ..primitives import INFINITY, LOG2E, dot, plan_range, position, visible


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
def pairs(bias, queries, keys, KEYS_FIRST: tl.constexpr):
    """Returns p, j, gain and C[p] - C[j] for the pairs of a tile. The difference is [BLOCK_M,
    BLOCK_N], or its transpose with KEYS_FIRST; the others broadcast to it.

    Each C is the sum of two float32 numbers, so that small differences survive after large steps.
    """
    p_first, gain, query_sums, _, _ = queries
    j_first, key_sums = keys
    p = p_first + tl.arange(0, query_sums[0].shape[0])
    j = j_first + tl.arange(0, key_sums[0].shape[0])
    difference = along(query_sums[0], KEYS_FIRST) - along(key_sums[0], not KEYS_FIRST)
    if bias.form == "cumulative":
        difference += along(query_sums[1], KEYS_FIRST) - along(key_sums[1], not KEYS_FIRST)
    else:
        difference = difference.to(tl.float32)
    return along(p, KEYS_FIRST), along(j, not KEYS_FIRST), along(gain, KEYS_FIRST), difference


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
    if not FACTORED and (MASKED or bias.form != "none" or not problem.positive_scale):
        p, j, gain, difference = pairs(bias, queries, keys, KEYS_FIRST)
        if MASKED:
            sees = visible(problem, p, j, queries[3], queries[4])
        if bias.form == "relative":
            values = LOG2E * relative_bias(
                *(bias, problem, b, h, queries[0], keys[0]),
                *(tile_q.shape[0], tile_k.shape[0], KEYS_FIRST),
            )
        else:
            values = tile_bias(bias, problem, b, h, p, j, gain, difference, sees)
        x = x * multiplier + values
        if MASKED:
            x = tl.where(sees, x, -INFINITY)
        multiplier = 1.0
    return x, multiplier, sees


@triton.jit
def along(x, COLUMNS: tl.constexpr):
    """Returns a vector [n] as a row [1, n] with COLUMNS, else as a column [n, 1]."""
    return x[None, :] if COLUMNS else x[:, None]
