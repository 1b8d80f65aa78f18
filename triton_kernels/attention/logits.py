"""The logits of a tile in base 2: scale, bias, base change, mask, always in this order."""

from __future__ import annotations

import triton
import triton.language as tl

from ..bias.tile import sums_from, tile_bias
from ..primitives import INFINITY, dot, keys_taken, position, visible


@triton.jit
def query_side(bias, problem, b, h, first, gain, BLOCK_M: tl.constexpr):
    """Of BLOCK_M queries with these gains: the first one's position, the gains, C[p], and the first
    and end of the keys that a plan leaves to them."""
    p_first = position(problem, first)
    sums = sums_from(bias, problem, b, h, p_first, BLOCK_M)
    first_key, end_key = keys_taken(problem, b, h, first)
    return p_first, gain, sums, first_key, end_key


@triton.jit
def key_side(bias, problem, b, h, first, BLOCK_N: tl.constexpr):
    """Of BLOCK_N keys: the first one's position, and C[j]."""
    return first, sums_from(bias, problem, b, h, first, BLOCK_N)


@triton.jit
def pairs(bias, queries, keys, KEYS_FIRST: tl.constexpr):
    """p, j, gain and C[p] - C[j] of the pairs of a tile: the last [BLOCK_M, BLOCK_N], or with
    KEYS_FIRST its transpose, the others to be broadcast to it.

    Sums are the sum of two float32 numbers, so that large steps do not swallow small ones.
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
    started,
    MASKED: tl.constexpr,
    FACTORED: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):
    """x, multiplier and the visibility mask: x multiplier are the logits, less one number per query
    where they are FACTORED. x is [BLOCK_M, BLOCK_N], or with KEYS_FIRST its transpose,
    and so is what it is started with: the product of the factors, or zeros.
    """
    multiplier, sees = problem.scale_in_base_2, True
    if KEYS_FIRST:
        x = dot(tile_k, tl.trans(tile_q), started)
    else:
        x = dot(tile_q, tl.trans(tile_k), started)
    if not FACTORED and (MASKED or bias.form != "none" or not problem.positive_scale):
        p, j, gain, difference = pairs(bias, queries, keys, KEYS_FIRST)
        if MASKED:
            sees = visible(problem, p, j, queries[3], queries[4])
        x = x * multiplier + tile_bias(bias, problem, b, h, p, j, gain, difference, sees)
        if MASKED:
            x = tl.where(sees, x, -INFINITY)
        multiplier = 1.0
    return x, multiplier, sees


@triton.jit
def along(x, COLUMNS: tl.constexpr):
    """A vector as one number a column, or as one number a row."""
    return x[None, :] if COLUMNS else x[:, None]
