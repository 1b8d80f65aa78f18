"""The bias of a tile and its gradient, computed from the tensors of a form.

"linear" and "cumulative" are both beta = g_i (C[p_i] - C[j]), negated for keys after the query. A
linear bias has the gain -slope and C[j] = j.

Functions that take p and gain of queries and j of keys broadcast them: the caller decides whether
queries are rows or columns of the tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ..primitives import LOG2E, load_numbers, position, row_address
from .segments import values_of


@triton.jit
def shared_gain(bias, b, h, BLOCK_M: tl.constexpr):
    """Returns the gain that all queries of a head share: -slope, or 1. [BLOCK_M]"""
    gain = tl.full([BLOCK_M], 1.0, tl.float32)
    if bias.form == "linear":
        gain *= -tl.load(row_address(bias.terms, b, h, 0))
    return gain


@triton.jit
def gains(bias, problem, b, h, first, BLOCK_M: tl.constexpr):
    """Returns the gains of queries first, first + 1, ...; per-query gains are 0 beyond the last
    query. [BLOCK_M]"""
    gain = shared_gain(bias, b, h, BLOCK_M)
    if bias.gain is not None:
        gain = load_numbers(bias.gain, problem, b, h, first, 0.0, BLOCK_M)
    return gain


@triton.jit
def prefix_sum_at(bias, problem, b, h, position, EXISTS: tl.constexpr = False):
    """Returns C at a position clamped to the range of C, or 0 in an empty sequence."""
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
def load_prefix_sums(bias, problem, b, h, first, COUNT: tl.constexpr):
    """Returns C at positions first, first + 1, ... as (high, low), whose float32 sum has relative
    error 2^-48; 0 outside the range of C. For other forms, the positions and 0. [COUNT] each."""
    n = tl.arange(0, COUNT)
    high, low = first + n, 0
    if bias.form == "cumulative":
        exists = (first + n >= 0) & (first + n < problem.n_key + problem.shift)
        high = tl.load(row_address(bias.high, b, h, first) + n, exists, other=0.0)
        low = tl.load(row_address(bias.low, b, h, first) + n, exists, other=0.0)
    return high, low


@triton.jit
def prefix_difference(origin, sums):
    """Returns sums - origin in float32, where origin is a result of prefix_sum_at. [n]"""
    high, low = sums
    if origin.dtype == tl.float64:
        origin_high = origin.to(tl.float32)
        return (high - origin_high) + (low - (origin - origin_high.to(tl.float64)).to(tl.float32))
    return (high - origin).to(tl.float32)


@triton.jit
def first_distance(problem):
    """Returns the distance of entry 0 of a table."""
    return 0 if problem.causal else 1 - problem.longest_query


@triton.jit
def table_values(bias, problem, b, h, p, j, sees):
    """Returns the entries of a table for the distances p - j, 0 where sees is False."""
    address = row_address(bias.terms, b, h, 0) + (p - j - first_distance(problem))
    return tl.load(address, sees, other=0.0)


@triton.jit
def negate_future(problem, x, p, j):
    """Returns x, negated for keys after the query."""
    if not problem.causal:
        x = tl.where(p < j, -x, x)
    return x


@triton.jit
def tile_bias(bias, problem, b, h, p, j, gain, difference, sees):
    """Returns the bias in base 2. difference is C[p] - C[j]. Where sees is False, the value is
    arbitrary."""
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
    elif bias.form == "normalized":
        x = gain * table_values(bias, problem, b, h, p, j, sees)
        values = values_of(bias.function, b, h, x) * LOG2E
    else:
        beta = gain * negate_future(problem, difference, p, j)
        values = -log2(1 + beta * beta) if bias.squared else beta * LOG2E
    return values


@triton.jit
def pair_address(x, b, h, i, j):
    """Returns the addresses of x[b, h, i, j] in a tensor x (B, H, Nq, Nk)."""
    return row_address(x, b, h, 0) + (tl.cast(i, tl.int64) * x.row + j)


@triton.jit
def log2(x):
    """log2(x), accurate to 2^-22. tl.log2 is more accurate, but takes eighteen instructions."""
    return libdevice.fast_log2f(x)


@triton.jit
def fast_divide(x, y):
    """x / y, accurate to 2^-22 for y up to 2^126, and 0 for larger y."""
    return libdevice.fast_dividef(x, y)


@triton.jit
def tile_gradients(bias, problem, grad_logits, p, j, gain, difference):
    """Returns the terms of the gradient of the gain, and those of the gradient of C[p] divided by
    the gain."""
    difference = negate_future(problem, difference, p, j)
    if bias.squared:
        beta = gain * difference
        grad_logits *= fast_divide(-2 * beta, 1 + beta * beta)
    return grad_logits * difference, negate_future(problem, grad_logits, p, j)
