"""The bias of a tile, and its gradient, from what a form holds.

"linear" and "cumulative" are both beta = g_i (C[p_i] - C[j]), its sign turned for keys after the
query: a linear bias has the gain -slope and a step of 1 a key. C is taken relative to the tile's
first key, in float64, before it is rounded to float32.

Functions that take vectors of queries (p, gain, from_tile) and of keys (j, key_sums) broadcast
them: the caller lays queries along rows or along columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from .primitives import FACTORS, INTERPRETED, LOG2E, row_address


@triton.jit
def query_terms(bias, b, h, i, p, n_query):
    """The gain and C[p] of queries i, both [BLOCK_M]; numbers that nobody reads for other forms."""
    gain = tl.full(i.shape, 1.0, tl.float32)
    sums = p
    if bias.form == "linear":
        gain *= -tl.load(row_address(bias.terms, b, h, 0))
    elif bias.form == "cumulative":
        if bias.gain is not None:
            gain = tl.load(row_address(bias.gain, b, h, 0) + i, i < n_query, other=0.0)
        of_position = row_address(bias.terms, b, h, 0) + p
        sums = tl.load(of_position, (p >= 0) & (i < n_query), other=0.0)
    return gain, sums


@triton.jit
def key_terms(bias, b, h, first, n_key, BLOCK_N: tl.constexpr):
    """C[first], and C[first + c] - C[first] in float32, [BLOCK_N]."""
    column = tl.arange(0, BLOCK_N)
    origin, key_sums = first, column.to(tl.float32)
    if bias.form == "cumulative":
        address = row_address(bias.terms, b, h, first)
        origin = tl.load(address)
        sums = tl.load(address + column, first + column < n_key, other=0.0)
        key_sums = (sums - origin).to(tl.float32)
    return origin, key_sums


@triton.jit
def turned(problem, x, p, j):
    """x, its sign turned for keys after the query."""
    if not problem.causal:
        x = tl.where(p < j, -x, x)
    return x


@triton.jit
def tile_bias(bias, problem, b, h, p, j, gain, from_tile, key_sums, sees):
    """In base 2; from_tile is C[p] - C[first key]. Any number where sees is False."""
    if bias.form == "none":
        values = 0.0
    elif bias.form == "distance":
        first_distance = 0 if problem.causal else 1 - problem.n_query
        values = tl.load(row_address(bias.terms, b, h, 0) + (p - j - first_distance), sees)
    else:
        beta = gain * turned(problem, from_tile - key_sums, p, j)
        values = -log2(1 + beta * beta) if bias.squared else beta * LOG2E
    return values


@triton.jit
def log2(x):
    """Accurate to 2^-22, which tl.log2 betters at eighteen instructions a number."""
    return tl.log2(x) if INTERPRETED else libdevice.fast_log2f(x)


@triton.jit
def tile_gradients(bias, problem, grad_logits, p, j, gain, from_tile, key_sums):
    """The terms of the gradients of the gain and, still to be multiplied by it, of C[p]."""
    difference = turned(problem, from_tile - key_sums, p, j)
    if bias.squared:
        beta = gain * difference
        grad_logits *= -2 * beta / (1 + beta * beta)
    return grad_logits * difference, turned(problem, grad_logits, p, j)


@triton.jit
def in_three(x):
    """Three bfloat16 numbers that add up to x but for 2^-24 of it."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def query_factors(x):
    """[n, 1] to the columns high, high, high, middle, middle, low.  [n, FACTORS]"""
    high, middle, low = in_three(x)
    column = tl.arange(0, FACTORS)[None, :]
    zero = tl.full([1, 1], 0.0, tl.bfloat16)
    return tl.where(
        column < 3, high, tl.where(column < 5, middle, tl.where(column == 5, low, zero))
    )


@triton.jit
def key_factors(x):
    """[n, 1] to the columns high, middle, low, high, middle, high.  [n, FACTORS]"""
    high, middle, low = in_three(x)
    column = tl.arange(0, FACTORS)[None, :]
    zero = tl.full([1, 1], 0.0, tl.bfloat16)
    is_high = (column == 0) | (column == 3) | (column == 5)
    is_middle = (column == 1) | (column == 4)
    return tl.where(is_high, high, tl.where(is_middle, middle, tl.where(column == 2, low, zero)))
