"""Which tiles matter to a block, and how their bias is computed.

The tiles of a block come in parts, each with a loop of its own:

    masked      some pairs see each other and some do not, or the sign of their distance differs
    factored    all pairs see each other, and the bias is factors of a matrix product:
                bias/factors.py
    otherwise   all pairs see each other, and the bias is computed pair by pair

A factored bias has the side 1 where all keys come before the queries, and -1 where they come after.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..bias.tile import first_distance
from ..primitives import keys_taken, position, round_down, round_up, row_address

KEY_PARTS = tl.constexpr(5)
QUERY_PARTS = tl.constexpr(6)


@triton.constexpr_function
def part_block(block, part_is_factored, factored):
    """Pairs that are computed one by one take more registers: where most are not, half the block
    at a time."""
    return block if part_is_factored or not factored else max(block // 2, 16)


@triton.jit
def far_distances(bias, problem, b, h, ROWS: tl.constexpr):
    """Tiles of ROWS queries have factors where all distances to the first query are at least the
    first of these numbers, or at most the second."""
    past, future = 0, -ROWS
    if bias.far is not None:
        address = row_address(bias.far, b, h, 0)
        past = tl.load(address) + first_distance(problem)
        future = tl.load(address + 1) + first_distance(problem)
    return past, future


@triton.jit
def key_ranges(problem, bias, b, h, first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the parts of the keys of queries first, first + 1, ... begin, and the last one ends.

    They are tiles that a window or plan hides in part, factored ones before the queries, those
    among and near the queries, factored ones after them, and what is left.
    """
    p_first = position(problem, first)
    p_last = position(problem, tl.minimum(first + BLOCK_M, problem.n_query) - 1)
    taken, end = keys_taken(problem, b, h, first)
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
        past, ahead = far_distances(bias, problem, b, h, BLOCK_M)
        past_end = tl.minimum(whole_end, round_down(p_first - past + 1, BLOCK_N))
        if not problem.causal:
            future = tl.minimum(whole_end, round_up(p_first - ahead, BLOCK_N))
        if bias.form == "distance":
            # Queries that are not there would ask for distances that are not in the table.
            partial = first + BLOCK_M > problem.n_query
            past_end = tl.where(partial, whole, past_end)
            future = tl.where(partial, whole_end, future)
    past_end = tl.maximum(past_end, whole)
    future = tl.maximum(future, past_end)
    return begin, whole, past_end, future, tl.maximum(whole_end, future), end


@triton.constexpr_function
def key_part_exists(part, causal, hidden, form, factored):
    """hidden: a window or plan hides keys before those that a query sees or takes."""
    near = not factored or form == "distance" or not causal
    return (hidden, factored, near, factored and not causal, True)[part]


@triton.constexpr_function
def key_part_is_masked(part, form, factored):
    return part in (0, 4) or (part == 2 and factored and form != "distance")


@triton.constexpr_function
def key_part_is_factored(part):
    return part in (1, 3)


@triton.constexpr_function
def key_part_side(part):
    return -1 if part == 3 else 1


@triton.jit
def query_ranges(problem, bias, b, h, first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the parts of the queries of keys first, first + 1, ... begin, and the last one ends.

    They are tiles before the keys that a plan hides in part, factored ones before the keys, masked
    ones among the keys, those near the keys, factored ones after them, and what is left.
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
    # Keys beyond the last one have no bias: their tile is masked for all queries.
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
        behind, ahead = far_distances(bias, problem, b, h, BLOCK_M)
        past = round_up(last - shift + behind, BLOCK_M)
        if not problem.causal:
            future_end = tl.minimum(whole_end, round_down(first - shift + ahead + BLOCK_M, BLOCK_M))
        if bias.form != "distance":
            near = past
    future_end = tl.maximum(future_end, start)
    near = tl.maximum(tl.minimum(near, end), future_end)
    past = tl.maximum(tl.minimum(past, whole_end), near)
    return begin, start, future_end, near, past, tl.maximum(whole_end, past), end


@triton.constexpr_function
def query_part_exists(part, causal, planned, form, factored):
    near = not factored or form == "distance"
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
