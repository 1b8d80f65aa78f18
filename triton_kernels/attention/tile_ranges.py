"""Divides the tiles of a block into ranges by how mask and bias are computed.

Each range (part) has its own loop:

    masked      not all pairs are visible, or their distances differ in sign
    factored    all pairs are visible, and the bias is a product of factors
                (bias/factors.py) or, beyond the band of a relative bias, 0
    otherwise   all pairs are visible, and the bias is evaluated pair by pair
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..bias.relative import first_column
from ..bias.tile import first_distance
from ..primitives import (
    load_keys,
    load_queries,
    plan_range,
    position,
    round_down,
    round_up,
    row_address,
)


class Part(NamedTuple):
    """The rows [begin, end) that a loop iterates over in tiles of `block` rows.

    masked: whether pairs may be masked. factored: whether the bias is not evaluated pair by pair.
    has_factors: whether it is a product of factors. side: 1 if the keys of a factored part are
    before the queries, and -1 if they are after them.
    """

    begin: int
    end: int
    block: tl.constexpr
    masked: tl.constexpr
    factored: tl.constexpr = tl.constexpr(False)
    has_factors: tl.constexpr = tl.constexpr(False)
    side: tl.constexpr = tl.constexpr(1)


class KeyRanges(NamedTuple):
    """The bounds of the parts of the keys of a block of queries, in increasing order.

    From begin: tiles partially masked by a window or plan. From whole: factored tiles before the
    queries. From near: tiles around the queries. From future: factored tiles after the queries.
    From whole_end: the remaining, masked tiles.
    """

    begin: int
    whole: int
    near: int
    future: int
    whole_end: int
    end: int


class QueryRanges(NamedTuple):
    """The bounds of the parts of the queries of a block of keys, in increasing order.

    From begin: tiles before the keys partially masked by a plan. From past: factored tiles before
    the keys. From masked: masked tiles around the keys. From near: unmasked tiles near the keys.
    From future: factored tiles after the keys. From whole_end: the remaining, masked tiles.
    """

    begin: int
    past: int
    masked: int
    near: int
    future: int
    whole_end: int
    end: int


@triton.constexpr_function
def pairwise_block(block, has_factors):
    """Returns the block size of parts that evaluate the bias pair by pair. This takes more
    registers than factors, so a bias that has them elsewhere uses half the block there."""
    return max(block // 2, 16) if has_factors else block


@triton.jit
def factored_distances(head, ROWS: tl.constexpr):
    """Returns (past, future): a tile of ROWS queries has factors if all distances to its first
    query are at least `past`, or at most `future`."""
    past, future = 0, -ROWS
    if head.bias.vector_tables is not None:
        first = first_column(head)
        past, future = first + head.bias.vector_tables.columns, first - ROWS
    if head.bias.far is not None:
        address = row_address(head.bias.far, head.b, head.h, 0)
        past = tl.load(address) + first_distance(head.problem)
        future = tl.load(address + 1) + first_distance(head.problem)
    return past, future


@triton.jit
def key_ranges(head, first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the KeyRanges of queries first, first + 1, ..."""
    p_first = position(head.problem, first)
    p_last = position(head.problem, tl.minimum(first + BLOCK_M, head.problem.n_query) - 1)
    taken, end = plan_range(head, first)
    begin, whole = round_down(taken, BLOCK_N), round_up(taken, BLOCK_N)
    whole_end = round_down(end, BLOCK_N)
    if head.problem.windowed:
        begin = tl.maximum(begin, round_down(p_first - head.problem.window + 1, BLOCK_N))
        whole = tl.maximum(whole, round_up(p_last - head.problem.window + 1, BLOCK_N))
    if head.problem.causal:
        end = tl.minimum(end, p_last + 1)
        whole_end = tl.minimum(whole_end, round_down(p_first + 1, BLOCK_N))
    near, future = whole, whole_end
    if head.bias.factored:
        nearest_past, nearest_future = factored_distances(head, BLOCK_M)
        near = tl.minimum(whole_end, round_down(p_first - nearest_past + 1, BLOCK_N))
        if not head.problem.causal:
            future = tl.minimum(whole_end, round_up(p_first - nearest_future, BLOCK_N))
        if head.bias.far is not None:
            # Queries beyond the last one would read distances outside the table.
            partial = first + BLOCK_M > head.problem.n_query
            near = tl.where(partial, whole, near)
            future = tl.where(partial, whole_end, future)
    near = tl.maximum(near, whole)
    future = tl.maximum(future, near)
    return KeyRanges(begin, whole, near, future, tl.maximum(whole_end, future), end)


@triton.jit
def query_ranges(head, first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the QueryRanges of keys first, first + 1, ..."""
    shift = position(head.problem, 0)
    last = tl.minimum(first + BLOCK_N, head.problem.n_key) - 1
    begin, near = 0, 0
    end, whole_end = head.problem.n_query, round_down(head.problem.n_query, BLOCK_M)
    if head.problem.causal:
        begin = round_down(first - shift, BLOCK_M)
        near = round_up(last - shift, BLOCK_M)
    if head.problem.windowed:
        end = tl.minimum(end, last + head.problem.window - shift)
        whole_end = tl.minimum(whole_end, round_down(first + head.problem.window - shift, BLOCK_M))
    # A tile with keys beyond the last one, which have no bias, is masked for all queries.
    whole_end = tl.where(first + BLOCK_N <= head.problem.n_key, whole_end, 0)
    past = begin
    if head.problem.plan is not None:
        queries = row_address(head.problem.plan.queries, head.b, head.h, first // BLOCK_N)
        begin = tl.maximum(begin, tl.load(queries))
        end = tl.minimum(end, tl.load(queries + 1))
        past = tl.maximum(begin, tl.load(queries + 2))
        whole_end = tl.minimum(whole_end, tl.load(queries + 3))
    masked, future = past, whole_end
    if head.bias.factored:
        nearest_past, nearest_future = factored_distances(head, BLOCK_M)
        future = round_up(last - shift + nearest_past, BLOCK_M)
        if not head.problem.causal:
            past_end = round_down(first - shift + nearest_future + BLOCK_M, BLOCK_M)
            masked = tl.minimum(whole_end, past_end)
        if not head.bias.only_far:
            near = future
    masked = tl.maximum(masked, past)
    near = tl.maximum(tl.minimum(near, end), masked)
    future = tl.maximum(tl.minimum(future, whole_end), near)
    return QueryRanges(begin, past, masked, near, future, tl.maximum(whole_end, future), end)


@triton.jit
def next_queries(x, head, first, part, DIM: tl.constexpr, CHANNELS: tl.constexpr):
    """Loads a tile of queries of a part. [block, CHANNELS]"""
    NARROW: tl.constexpr = head.problem.narrow_offsets
    return load_queries(x, head, first, DIM, part.block, CHANNELS, part.masked, NARROW)


@triton.jit
def next_keys(x, head, first, part, DIM: tl.constexpr, CHANNELS: tl.constexpr):
    """Loads a tile of keys of a part. [block, CHANNELS]"""
    NARROW: tl.constexpr = head.problem.narrow_offsets
    return load_keys(x, head, first, DIM, part.block, CHANNELS, part.masked, NARROW)


@triton.jit
def over_keys(accumulate, head, block, sums, first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Calls `accumulate` for each part of the keys that queries first, first + 1, ... attend to.

    accumulate: a function of head, block, sums and a Part that returns the new sums. block: the
    operands of the queries.
    """
    FACTORED: tl.constexpr = head.bias.factored
    TWO_SIDED: tl.constexpr = not head.problem.causal
    HAS_FACTORS: tl.constexpr = head.bias.query_factors is not None
    # Whether all other tiles have distances of both signs.
    MIXED: tl.constexpr = FACTORED and not head.bias.only_far
    BLOCK: tl.constexpr = pairwise_block(BLOCK_N, HAS_FACTORS)
    at = key_ranges(head, first, BLOCK_M, BLOCK_N)
    if head.problem.windowed or head.problem.plan is not None:
        sums = accumulate(head, block, sums, Part(at.begin, at.whole, BLOCK, True))
    if FACTORED:
        sums = accumulate(
            head, block, sums, Part(at.whole, at.near, BLOCK_N, False, True, HAS_FACTORS, 1)
        )
    if not MIXED or TWO_SIDED:
        sums = accumulate(head, block, sums, Part(at.near, at.future, BLOCK, MIXED))
    if FACTORED and TWO_SIDED:
        sums = accumulate(
            head, block, sums, Part(at.future, at.whole_end, BLOCK_N, False, True, HAS_FACTORS, -1)
        )
    return accumulate(head, block, sums, Part(at.whole_end, at.end, BLOCK, True))


@triton.jit
def over_queries(
    accumulate, head, block, sums, first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Calls `accumulate` for each part of the queries that attend to keys first, first + 1, ...;
    see over_keys. block: the operands of the keys."""
    FACTORED: tl.constexpr = head.bias.factored
    TWO_SIDED: tl.constexpr = not head.problem.causal
    HAS_FACTORS: tl.constexpr = head.bias.query_factors is not None
    # Whether all other tiles have distances of both signs.
    MIXED: tl.constexpr = FACTORED and not head.bias.only_far
    BLOCK: tl.constexpr = pairwise_block(BLOCK_M, HAS_FACTORS)
    at = query_ranges(head, first, BLOCK_M, BLOCK_N)
    if head.problem.plan is not None and TWO_SIDED:
        sums = accumulate(head, block, sums, Part(at.begin, at.past, BLOCK, True))
    if FACTORED and TWO_SIDED:
        sums = accumulate(
            head, block, sums, Part(at.past, at.masked, BLOCK_M, False, True, HAS_FACTORS, -1)
        )
    if MIXED or not TWO_SIDED:
        sums = accumulate(head, block, sums, Part(at.masked, at.near, BLOCK, True))
    if not MIXED:
        sums = accumulate(head, block, sums, Part(at.near, at.future, BLOCK, False))
    if FACTORED:
        sums = accumulate(
            head, block, sums, Part(at.future, at.whole_end, BLOCK_M, False, True, HAS_FACTORS, 1)
        )
    return accumulate(head, block, sums, Part(at.whole_end, at.end, BLOCK, True))
