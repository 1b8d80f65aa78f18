"""Which tiles matter to a block, and which of them need a mask."""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import round_down, round_up

# The tiles of a block come in parts, masked and unmasked in turn. In one of them all keys come
# after all queries, which turns the sign of a factored bias.
KEY_PARTS = tl.constexpr(5)
QUERY_PARTS = tl.constexpr(4)


@triton.jit
def key_ranges(problem, bias, first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the parts of the keys of queries first, first + 1, ... begin, and the last one ends.

    They are those that a window hides in part, whole tiles before all queries, tiles among the
    queries, whole tiles after all queries, and what is left.
    """
    p_first = first + problem.n_key - problem.n_query
    p_last = tl.minimum(first + BLOCK_M, problem.n_query) - 1 + problem.n_key - problem.n_query
    begin, whole = 0, 0
    end, whole_end = problem.n_key, round_down(problem.n_key, BLOCK_N)
    if problem.windowed:
        begin = round_down(p_first - problem.window + 1, BLOCK_N)
        whole = round_up(p_last - problem.window + 1, BLOCK_N)
    if problem.causal:
        end = tl.minimum(end, p_last + 1)
        whole_end = tl.minimum(whole_end, round_down(p_first + 1, BLOCK_N))
    past_end, future = whole_end, whole_end
    if bias.factored and not problem.causal:
        past_end = tl.minimum(whole_end, round_down(p_first + 1, BLOCK_N))
        future = tl.minimum(whole_end, round_up(p_last + 1, BLOCK_N))
    past_end = tl.maximum(past_end, whole)
    future = tl.maximum(future, past_end)
    return begin, whole, past_end, future, tl.maximum(whole_end, future), end


@triton.constexpr_function
def key_part_exists(part, causal, windowed, factored):
    two_sided = factored and not causal
    return (windowed, True, two_sided, two_sided, True)[part]


@triton.constexpr_function
def key_part_is_masked(part):
    return part % 2 == 0


@triton.constexpr_function
def key_part_side(part):
    return -1 if part == 3 else 1


@triton.jit
def query_ranges(problem, bias, first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the parts of the queries of keys first, first + 1, ... begin, and the last one ends.

    They are whole tiles before all keys, tiles among the keys, whole tiles after all keys, and
    what is left.
    """
    shift = problem.n_key - problem.n_query
    last = tl.minimum(first + BLOCK_N, problem.n_key) - 1
    begin, past = 0, 0
    end, whole_end = problem.n_query, round_down(problem.n_query, BLOCK_M)
    if problem.causal:
        begin = round_down(first - shift, BLOCK_M)
    if problem.windowed:
        end = tl.minimum(end, last + problem.window - shift)
        whole_end = tl.minimum(whole_end, round_down(first + problem.window - shift, BLOCK_M))
    # Keys beyond the last one have no bias: their tile is masked for all queries.
    whole_end = tl.where(first + BLOCK_N <= problem.n_key, whole_end, 0)
    future_end = begin
    if bias.factored and not problem.causal:
        future_end = tl.minimum(whole_end, round_down(first - shift, BLOCK_M))
    if problem.causal or bias.factored:
        past = round_up(last - shift, BLOCK_M)
    past = tl.maximum(tl.minimum(past, end), future_end)
    return begin, future_end, past, tl.maximum(whole_end, past), end


@triton.constexpr_function
def query_part_exists(part, causal, factored):
    return (factored and not causal, factored or causal, True, True)[part]


@triton.constexpr_function
def query_part_is_masked(part):
    return part % 2 == 1


@triton.constexpr_function
def query_part_side(part):
    return -1 if part == 0 else 1
