"""The logits of a tile in base 2: scale, bias, base change, mask, always in this order."""

from __future__ import annotations

import triton
import triton.language as tl

from .bias import key_terms, tile_bias
from .primitives import INFINITY, LOG2E, dot, row_address, visible


@triton.jit
def query_side(bias, problem, b, h, first, gain, BLOCK_M: tl.constexpr):
    """Of BLOCK_M queries: their positions, gains, or the one they share, and C[p]. [BLOCK_M]"""
    i = first + tl.arange(0, BLOCK_M)
    p = i + (problem.n_key - problem.n_query)
    sums = p
    if bias.gain is not None:
        gain = tl.load(row_address(bias.gain, b, h, 0) + i, i < problem.n_query, other=0.0)
    if bias.form == "cumulative":
        of_position = row_address(bias.terms, b, h, 0) + p
        sums = tl.load(of_position, (p >= 0) & (i < problem.n_query), other=0.0)
    return p, gain, sums


@triton.jit
def key_side(bias, problem, b, h, first, BLOCK_N: tl.constexpr):
    """Of BLOCK_N keys: their positions, C[first] and C[j] - C[first]."""
    j = first + tl.arange(0, BLOCK_N)
    origin, sums = key_terms(bias, b, h, first, problem.n_key, BLOCK_N)
    return j, origin, sums


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
    q_factors,
    k_factors,
    EDGE: tl.constexpr,
    SIDE: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):
    """x, multiplier and offset with logits = x multiplier + offset, and who sees whom.

    x is [BLOCK_M, BLOCK_N], or with KEYS_FIRST its transpose; offset has one number a query or is
    0. EDGE: the tile is masked and a query may have keys on both sides. Without it, a factored
    bias has the sign SIDE.
    """
    p, gain, sums = queries
    j, origin, key_sums = keys
    from_tile = (sums - origin).to(tl.float32)
    multiplier, offset, sees = problem.scale_in_base_2, 0.0, None
    x = dot(tile_k, tl.trans(tile_q)) if KEYS_FIRST else dot(tile_q, tl.trans(tile_k))
    if bias.factored and not EDGE:
        if KEYS_FIRST:
            x = dot(k_factors, tl.trans(q_factors), x)
        else:
            x = dot(q_factors, tl.trans(k_factors), x)
        offset = (SIDE * LOG2E) * gain * from_tile
    elif EDGE or bias.form != "none" or not problem.positive_scale:
        p, gain, from_tile = (
            along(p, KEYS_FIRST),
            along(gain, KEYS_FIRST),
            along(from_tile, KEYS_FIRST),
        )
        j, key_sums = along(j, not KEYS_FIRST), along(key_sums, not KEYS_FIRST)
        if EDGE:
            sees = visible(problem, p, j)
        x = x * multiplier + tile_bias(bias, problem, b, h, p, j, gain, from_tile, key_sums, sees)
        if EDGE:
            x = tl.where(sees, x, -INFINITY)
        multiplier = 1.0
    return x, multiplier, offset, sees


@triton.jit
def along(x, COLUMNS: tl.constexpr):
    """A vector as one number a column, or as one number a row."""
    return x[None, :] if COLUMNS else x[:, None]
