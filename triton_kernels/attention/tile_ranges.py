"""Divides the tiles of a block into ranges by how mask and bias are computed.

Each range (part) has its own loop:

    masked      not all pairs are visible, or their distances differ in sign
    factored    all pairs are visible, and the bias is a product of factors
                (bias/factors.py) or, beyond the band of a relative bias, 0
    otherwise   all pairs are visible, and the bias is evaluated pair by pair

The side of a factored part is 1 if all keys are before the queries, and -1 if they are after them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..bias.relative import first_column
from ..bias.tile import first_distance
from ..primitives import plan_range, position, round_down, round_up, row_address

KEY_PARTS = tl.constexpr(5)
QUERY_PARTS = tl.constexpr(6)


@triton.constexpr_function
def part_block(block, part_is_factored, factored):
    """Returns the block size of a part. Evaluating a bias pair by pair takes more registers, so the
    unfactored parts of a factored bias use half the block."""
    return block if part_is_factored or not factored else max(block // 2, 16)


@triton.jit
def factored_distances(bias, problem, b, h, ROWS: tl.constexpr):
    """Returns (past, future): a tile of ROWS queries has factors if all distances to its first
    query are at least `past`, or at most `future`."""
    past, future = 0, -ROWS
    if bias.vector_tables is not None:
        first = first_column(bias, problem)
        past, future = first + bias.vector_tables.columns, first - ROWS
    if bias.far is not None:
        address = row_address(bias.far, b, h, 0)
        past = tl.load(address) + first_distance(problem)
        future = tl.load(address + 1) + first_distance(problem)
    return past, future


@triton.jit
def key_ranges(problem, bias, b, h, first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the bounds of the parts of the keys of queries first, first + 1, ...: part n is
    [bounds[n], bounds[n + 1]).

    0: tiles partially masked by a window or plan. 1: factored tiles before the queries. 2: tiles
    around the queries. 3: factored tiles after the queries. 4: the remaining, masked tiles.
    """
    p_first = position(problem, first)
    p_last = position(problem, tl.minimum(first + BLOCK_M, problem.n_query) - 1)
    taken, end = plan_range(problem, b, h, first)
    begin, whole = round_down(taken, BLOCK_N), round_up(taken, BLOCK_N)
    whole_end = round_down(end, BLOCK_N)
    if problem.windowed:
        begin = tl.maximum(begin, round_down(p_first - problem.window + 1, BLOCK_N))
        whole = tl.maximum(whole, round_up(p_last - problem.window + 1, BLOCK_N))
    if problem.causal:
        end = tl.minimum(end, p_last + 1)
        whole_end = tl.minimum(whole_end, round_down(p_first + 1, BLOCK_N))
    past_end, future = whole, whole_end
    if bias.factored:
        past, ahead = factored_distances(bias, problem, b, h, BLOCK_M)
        past_end = tl.minimum(whole_end, round_down(p_first - past + 1, BLOCK_N))
        if not problem.causal:
            future = tl.minimum(whole_end, round_up(p_first - ahead, BLOCK_N))
        if bias.far is not None:
            # Queries beyond the last one would read distances outside the table.
            partial = first + BLOCK_M > problem.n_query
            past_end = tl.where(partial, whole, past_end)
            future = tl.where(partial, whole_end, future)
    past_end = tl.maximum(past_end, whole)
    future = tl.maximum(future, past_end)
    return begin, whole, past_end, future, tl.maximum(whole_end, future), end


@triton.constexpr_function
def key_part_exists(part, causal, hidden, factored, only_far):
    """Whether a part can be nonempty. hidden: a window or plan masks keys before the visible ones.
    only_far: tiles are factored only far from the queries."""
    near = not factored or only_far or not causal
    return (hidden, factored, near, factored and not causal, True)[part]


@triton.constexpr_function
def key_part_is_masked(part, factored, only_far):
    return part in (0, 4) or (part == 2 and factored and not only_far)


@triton.constexpr_function
def key_part_is_factored(part):
    return part in (1, 3)


@triton.constexpr_function
def key_part_side(part):
    return -1 if part == 3 else 1


@triton.jit
def query_ranges(problem, bias, b, h, first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the bounds of the parts of the queries of keys first, first + 1, ...: part n is
    [bounds[n], bounds[n + 1]).

    0: tiles before the keys partially masked by a plan. 1: factored tiles before the keys. 2:
    masked tiles around the keys. 3: unmasked tiles near the keys. 4: factored tiles after the keys.
    5: the remaining, masked tiles.
    """
    shift = position(problem, 0)
    last = tl.minimum(first + BLOCK_N, problem.n_key) - 1
    begin, near = 0, 0
    end, whole_end = problem.n_query, round_down(problem.n_query, BLOCK_M)
    if problem.causal:
        begin = round_down(first - shift, BLOCK_M)
        near = round_up(last - shift, BLOCK_M)
    if problem.windowed:
        end = tl.minimum(end, last + problem.window - shift)
        whole_end = tl.minimum(whole_end, round_down(first + problem.window - shift, BLOCK_M))
    # A tile with keys beyond the last one, which have no bias, is masked for all queries.
    whole_end = tl.where(first + BLOCK_N <= problem.n_key, whole_end, 0)
    start = begin
    if problem.plan is not None:
        queries = row_address(problem.plan.queries, b, h, first // BLOCK_N)
        begin = tl.maximum(begin, tl.load(queries))
        end = tl.minimum(end, tl.load(queries + 1))
        start = tl.maximum(begin, tl.load(queries + 2))
        whole_end = tl.minimum(whole_end, tl.load(queries + 3))
    future_end, past = start, whole_end
    if bias.factored:
        behind, ahead = factored_distances(bias, problem, b, h, BLOCK_M)
        past = round_up(last - shift + behind, BLOCK_M)
        if not problem.causal:
            future_end = tl.minimum(whole_end, round_down(first - shift + ahead + BLOCK_M, BLOCK_M))
        if not bias.only_far:
            near = past
    future_end = tl.maximum(future_end, start)
    near = tl.maximum(tl.minimum(near, end), future_end)
    past = tl.maximum(tl.minimum(past, whole_end), near)
    return begin, start, future_end, near, past, tl.maximum(whole_end, past), end


@triton.constexpr_function
def query_part_exists(part, causal, planned, factored, only_far):
    near = not factored or only_far
    two_sided = factored and not causal
    return (planned and not causal, two_sided, causal or not near, near, factored, True)[part]


@triton.constexpr_function
def query_part_is_masked(part):
    return part in (0, 2, 5)


@triton.constexpr_function
def query_part_is_factored(part):
    return part in (1, 4)


@triton.constexpr_function
def query_part_side(part):
    return -1 if part == 1 else 1
