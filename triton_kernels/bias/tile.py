"""The bias of a tile, and its gradient, from what a form holds.

"linear" and "cumulative" are both beta = g_i (C[p_i] - C[j]), its sign turned for keys after the
query: a linear bias has the gain -slope and a step of 1 a key.

Functions that take p and gain of queries and j of keys broadcast them: the caller lays queries
along rows or along columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ..primitives import LOG2E, load_numbers, position, row_address


@triton.jit
def shared_gain(bias, b, h, BLOCK_M: tl.constexpr):
    """The gain of all queries of a head, where they have one in common. [BLOCK_M]"""
    gain = tl.full([BLOCK_M], 1.0, tl.float32)
    if bias.form == "linear":
        gain *= -tl.load(row_address(bias.terms, b, h, 0))
    return gain


@triton.jit
def gains(bias, problem, b, h, first, BLOCK_M: tl.constexpr):
    """Those of BLOCK_M queries; where each has its own, 0 beyond the last query."""
    gain = shared_gain(bias, b, h, BLOCK_M)
    if bias.gain is not None:
        gain = load_numbers(bias.gain, problem, b, h, first, 0.0, BLOCK_M)
    return gain


@triton.jit
def sum_at(bias, problem, b, h, position, EXISTS: tl.constexpr = False):
    """C of one position, or of the nearest that has one; 0 in a sequence where none has."""
    value = position
    if bias.form == "cumulative":
        places = problem.n_key + problem.shift
        if not EXISTS:
            position = tl.minimum(tl.maximum(position, 0), places - 1)
        address = row_address(bias.terms, b, h, position)
        if problem.sequences is None:
            value = tl.load(address)
        else:
            value = tl.load(address, places > 0, other=0.0)
    return value


@triton.jit
def sums_from(bias, problem, b, h, first, COUNT: tl.constexpr):
    """C of positions first, first + 1, ..., each as two float32 numbers whose sum it is but for
    2^-48 of it; 0 where there is none. Without sums, the positions, and 0."""
    n = tl.arange(0, COUNT)
    high, low = first + n, 0
    if bias.form == "cumulative":
        exists = (first + n >= 0) & (first + n < problem.n_key + problem.shift)
        high = tl.load(row_address(bias.high, b, h, first) + n, exists, other=0.0)
        low = tl.load(row_address(bias.low, b, h, first) + n, exists, other=0.0)
    return high, low


@triton.jit
def prefix_difference(origin, sums):
    """C less that of an origin, one number of sum_at, in float32."""
    high, low = sums
    if origin.dtype == tl.float64:
        origin_high = origin.to(tl.float32)
        return (high - origin_high) + (low - (origin - origin_high.to(tl.float64)).to(tl.float32))
    return (high - origin).to(tl.float32)


@triton.jit
def first_distance(problem):
    """The distance with which a table begins."""
    return 0 if problem.causal else 1 - problem.longest_query


@triton.jit
def turned(problem, x, p, j):
    """x, its sign turned for keys after the query."""
    if not problem.causal:
        x = tl.where(p < j, -x, x)
    return x


@triton.jit
def tile_bias(bias, problem, b, h, p, j, gain, difference, sees):
    """In base 2; difference is C[p] - C[j]. Any number where sees is False."""
    if bias.form == "none":
        values = 0.0
    elif bias.form == "distance":
        table = row_address(bias.terms, b, h, 0)
        values = tl.load(table + (p - j - first_distance(problem)), sees)
    elif bias.form == "dense":
        i = p - position(problem, 0)
        exists = (i < problem.n_query) & (j < problem.n_key) & sees
        numbers = tl.load(pair_address(bias.terms, b, h, i, j), exists, other=0.0)
        values = numbers.to(tl.float32) * LOG2E
    else:
        beta = gain * turned(problem, difference, p, j)
        values = -log2(1 + beta * beta) if bias.squared else beta * LOG2E
    return values


@triton.jit
def pair_address(x, b, h, i, j):
    """Of the numbers of pairs, x (B, H, Nq, Nk)."""
    return row_address(x, b, h, 0) + (tl.cast(i, tl.int64) * x.row + j)


@triton.jit
def log2(x):
    """Accurate to 2^-22, which tl.log2 betters at eighteen instructions a number."""
    return libdevice.fast_log2f(x)


@triton.jit
def divided(x, y):
    """x / y, accurate to 2^-22 while y is at most 2^126, and 0 beyond."""
    return libdevice.fast_dividef(x, y)


@triton.jit
def tile_gradients(bias, problem, grad_logits, p, j, gain, difference):
    """The terms of the gradients of the gain and, still to be multiplied by it, of C[p]."""
    difference = turned(problem, difference, p, j)
    if bias.squared:
        beta = gain * difference
        grad_logits *= divided(-2 * beta, 1 + beta * beta)
    return grad_logits * difference, turned(problem, grad_logits, p, j)
