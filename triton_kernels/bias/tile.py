"""What the bias of a tile depends on: its queries, its keys, and their pairs.

A bias with slopes or prefix sums is beta = g_i (C[p_i] - C[j]), negated for keys after the query.
With slopes, the gain is -slope and C[j] = j.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..primitives import along, limited_gain, load_numbers, plan_range, position, row_address


class PrefixSums(NamedTuple):
    """C at consecutive positions: two float32 numbers, whose sum has relative error 2^-48, so that
    small differences survive after large steps. Without sums, C is the position and `low` 0."""

    high: tl.tensor
    low: tl.tensor


class Queries(NamedTuple):
    """What the bias and the mask of a tile depend on, for its queries.

    first: the position of the first query. gain, sums: of each query. first_key, end_key: the key
    range [first_key, end_key) of the plan.
    """

    first: tl.tensor
    gain: tl.tensor
    sums: PrefixSums
    first_key: tl.tensor
    end_key: tl.tensor


class Keys(NamedTuple):
    """The same for the keys of a tile, which start at the position `first`."""

    first: tl.tensor
    sums: PrefixSums


class Pairs(NamedTuple):
    """The pairs of a tile: position p and gain of the query, position j of the key, and C[p] -
    C[j]. The difference is [BLOCK_M, BLOCK_N] or its transpose; the others broadcast to it."""

    p: tl.tensor
    j: tl.tensor
    gain: tl.tensor
    difference: tl.tensor


@triton.jit
def shared_gain(head, BLOCK_M: tl.constexpr):
    """Returns the gain that all queries of a head share: -slope, or 1. [BLOCK_M]"""
    gain = tl.full([BLOCK_M], 1.0, tl.float32)
    if head.bias.slopes is not None:
        gain *= -limited_gain(tl.load(row_address(head.bias.slopes, head.b, head.h, 0)))
    return gain


@triton.jit
def gains(head, first, BLOCK_M: tl.constexpr):
    """Returns the gains of queries first, first + 1, ...; per-query gains are 0 beyond the last
    query. [BLOCK_M]"""
    gain = shared_gain(head, BLOCK_M)
    if head.bias.gain is not None:
        gain = load_numbers(head.bias.gain, head, first, 0.0, BLOCK_M)
        if head.bias.function is None:
            gain = limited_gain(gain)
    return gain


@triton.jit
def queries_from(head, first, gain):
    """Returns the Queries first, first + 1, ..., whose gains are given."""
    p_first = position(head.problem, first)
    sums = load_prefix_sums(head, p_first, gain.shape[0])
    first_key, end_key = plan_range(head, first)
    return Queries(p_first, gain, sums, first_key, end_key)


@triton.jit
def keys_from(head, first, BLOCK_N: tl.constexpr):
    """Returns the Keys first, first + 1, ..."""
    return Keys(first, load_prefix_sums(head, first, BLOCK_N))


@triton.jit
def prefix_sum_at(head, position, EXISTS: tl.constexpr = False):
    """Returns C at a position clamped to the range of C, or 0 in an empty sequence."""
    value = position
    if head.bias.sums is not None:
        places = head.problem.n_key + head.problem.shift
        if not EXISTS:
            position = tl.minimum(tl.maximum(position, 0), places - 1)
        address = row_address(head.bias.sums, head.b, head.h, position)
        if head.problem.sequences is None:
            value = tl.load(address)
        else:
            value = tl.load(address, places > 0, other=0.0)
    return value


@triton.jit
def load_prefix_sums(head, first, COUNT: tl.constexpr):
    """Returns the PrefixSums at positions first, first + 1, ..., 0 outside the range of C.
    [COUNT]"""
    n = tl.arange(0, COUNT)
    high, low = first + n, 0
    if head.bias.sums is not None:
        exists = (first + n >= 0) & (first + n < head.problem.n_key + head.problem.shift)
        high_address = row_address(head.bias.high, head.b, head.h, first) + n
        low_address = row_address(head.bias.low, head.b, head.h, first) + n
        high = tl.load(high_address, exists, other=0.0)
        low = tl.load(low_address, exists, other=0.0)
    return PrefixSums(high, low)


@triton.jit
def prefix_difference(origin, sums):
    """Returns sums - origin in float32, where origin is a result of prefix_sum_at. [n]"""
    if origin.dtype == tl.float64:
        origin_high = origin.to(tl.float32)
        origin_low = (origin - origin_high.to(tl.float64)).to(tl.float32)
        return (sums.high - origin_high) + (sums.low - origin_low)
    return (sums.high - origin).to(tl.float32)


@triton.jit
def first_distance(problem):
    """Returns the distance of entry 0 of a table."""
    return 0 if problem.causal else 1 - problem.longest_query


@triton.jit
def table_values(head, pairs, sees, masked):
    """Returns the entries of a table for the distances of pairs, `masked` or, if that is None,
    arbitrary where sees is False."""
    distance = pairs.p - pairs.j - first_distance(head.problem)
    return tl.load(row_address(head.bias.table, head.b, head.h, 0) + distance, sees, other=masked)


@triton.jit
def negate_future(problem, x, pairs):
    """Returns x, negated for keys after the query."""
    if not problem.causal:
        x = tl.where(pairs.p < pairs.j, -x, x)
    return x


@triton.jit
def pairs_of(head, queries, keys, KEYS_FIRST: tl.constexpr):
    """Returns the Pairs of a tile, with KEYS_FIRST those of its transpose."""
    p = queries.first + tl.arange(0, queries.gain.shape[0])
    j = keys.first + tl.arange(0, keys.sums.high.shape[0])
    difference = along(queries.sums.high, KEYS_FIRST) - along(keys.sums.high, not KEYS_FIRST)
    if head.bias.sums is not None:
        difference += along(queries.sums.low, KEYS_FIRST) - along(keys.sums.low, not KEYS_FIRST)
    else:
        difference = difference.to(tl.float32)
    p, j = along(p, KEYS_FIRST), along(j, not KEYS_FIRST)
    return Pairs(p, j, along(queries.gain, KEYS_FIRST), difference)


@triton.jit
def pair_address(x, head, pairs):
    """Returns the addresses of pairs in a tensor x (B, H, Nq, Nk), and which pairs exist."""
    i = pairs.p - position(head.problem, 0)
    exists = (i < head.problem.n_query) & (pairs.j < head.problem.n_key)
    return row_address(x, head.b, head.h, 0) + (tl.cast(i, tl.int64) * x.row + pairs.j), exists
