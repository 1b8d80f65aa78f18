"""The bias of a tile, computed from the operands of a form.

A bias with slopes or prefix sums is beta = g_i (C[p_i] - C[j]), negated for keys after the query.
With slopes, the gain is -slope and C[j] = j.

Functions that take p and gain of queries and j of keys broadcast them: the caller decides whether
queries are rows or columns of the tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ..primitives import LOG2E, along, load_numbers, position, row_address
from .relative import relative_bias
from .segments import values_of


@triton.jit
def shared_gain(bias, b, h, BLOCK_M: tl.constexpr):
    """Returns the gain that all queries of a head share: -slope, or 1. [BLOCK_M]"""
    gain = tl.full([BLOCK_M], 1.0, tl.float32)
    if bias.slopes is not None:
        gain *= -tl.load(row_address(bias.slopes, b, h, 0))
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
    if bias.sums is not None:
        places = problem.n_key + problem.shift
        if not EXISTS:
            position = tl.minimum(tl.maximum(position, 0), places - 1)
        address = row_address(bias.sums, b, h, position)
        if problem.sequences is None:
            value = tl.load(address)
        else:
            value = tl.load(address, places > 0, other=0.0)
    return value


@triton.jit
def load_prefix_sums(bias, problem, b, h, first, COUNT: tl.constexpr):
    """Returns C at positions first, first + 1, ... as (high, low), whose float32 sum has relative
    error 2^-48; 0 outside the range of C. Without sums, the positions and 0. [COUNT] each."""
    n = tl.arange(0, COUNT)
    high, low = first + n, 0
    if bias.sums is not None:
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
    address = row_address(bias.table, b, h, 0) + (p - j - first_distance(problem))
    return tl.load(address, sees, other=0.0)


@triton.jit
def negate_future(problem, x, p, j):
    """Returns x, negated for keys after the query."""
    if not problem.causal:
        x = tl.where(p < j, -x, x)
    return x


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
    if bias.sums is not None:
        difference += along(query_sums[1], KEYS_FIRST) - along(key_sums[1], not KEYS_FIRST)
    else:
        difference = difference.to(tl.float32)
    return along(p, KEYS_FIRST), along(j, not KEYS_FIRST), along(gain, KEYS_FIRST), difference


@triton.jit
def tile_bias(bias, problem, b, h, queries, keys, tile_pairs, sees, KEYS_FIRST: tl.constexpr):
    """Returns the bias of a tile in base 2, [BLOCK_M, BLOCK_N], or its transpose with KEYS_FIRST.
    Where sees is False, the value is arbitrary.

    queries, keys: see attention/logits.py. tile_pairs: a result of `pairs`.
    """
    p, j, gain, difference = tile_pairs
    values = 0.0
    if bias.vector_tables is not None:
        values = LOG2E * relative_bias(bias, problem, b, h, queries, keys, KEYS_FIRST)
    elif bias.of_pairs is not None:
        i = p - position(problem, 0)
        exists = (i < problem.n_query) & (j < problem.n_key) & sees
        numbers = tl.load(pair_address(bias.of_pairs, b, h, i, j), exists, other=0.0)
        values = numbers.to(tl.float32) * LOG2E
    elif bias.function is not None:
        x = gain * table_values(bias, problem, b, h, p, j, sees)
        values = values_of(bias.function, b, h, x) * LOG2E
    elif bias.table is not None:
        table = row_address(bias.table, b, h, 0)
        values = tl.load(table + (p - j - first_distance(problem)), sees)
    elif bias.exists:
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
