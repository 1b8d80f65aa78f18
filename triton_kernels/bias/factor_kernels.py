"""Kernels that compute the factors of queries and of keys."""

from __future__ import annotations

import triton
import triton.language as tl

from ..operands import Head
from ..primitives import FACTORS, LOG2E, position, row_address, tile_addresses
from ..sequences import (
    N_KEY,
    N_QUERY,
    SequenceBias,
    SequenceProblem,
    is_past_end,
    per_token_operands,
    sequence_keys,
    sequence_lengths,
    sequence_queries,
)
from .factors import key_factors, key_origin, query_factors, query_origin
from .tile import gains, load_prefix_sums, prefix_difference

# The logit of a query without visible keys: finite, so that its bfloat16 parts are finite too.
MIN_LOGIT = tl.constexpr(-1e30)


@triton.jit
def store_query_factors(
    factors, head, lse_in_base_2, first, BLOCK_M: tl.constexpr, SIDE: tl.constexpr
):
    """Computes query_factors_kernel for one block of one sequence."""
    p_first = position(head.problem, first)
    gain = gains(head, first, BLOCK_M)
    rest = tl.zeros([BLOCK_M], tl.float32)
    if lse_in_base_2 is not None:
        i = first + tl.arange(0, BLOCK_M)
        address = row_address(lse_in_base_2, head.b, head.h, 0) + i
        lse = tl.load(address, i < head.problem.n_query, other=0.0)
        sums = load_prefix_sums(head, p_first, BLOCK_M)
        difference = prefix_difference(query_origin(head, p_first, BLOCK_M, SIDE), sums)
        rest = ((SIDE * LOG2E) * gain * difference - lse) / head.problem.scale_in_base_2
        rest = tl.maximum(rest, MIN_LOGIT)
    values = query_factors((gain * (-SIDE / head.problem.scale))[:, None], rest[:, None])
    tl.store(tile_addresses(factors, head.b, head.h, first, BLOCK_M, FACTORS), values)


@triton.jit
def query_factors_kernel(
    factors, bias, problem, lse_in_base_2, BLOCK_M: tl.constexpr, SIDE: tl.constexpr
):
    """factors[b, h, i] = query_factors(-SIDE g_i / scale, rest_i), where rest_i combines the first
    term of beta and -lse if lse_in_base_2 is given, and is 0 otherwise.

    factors (B or 1, H or 1, n, FACTORS), n a multiple of BLOCK_M: one row per query, or BLOCK_M
    rows if all queries have the same.
    """
    b, h = tl.program_id(0), tl.program_id(1)
    first = tl.program_id(2) * BLOCK_M
    if is_past_end(problem, b, first, N_QUERY):
        return
    store_query_factors(
        sequence_queries(factors, problem, b),
        Head(
            SequenceBias(bias, per_token_operands(bias, problem, b)),
            SequenceProblem(problem, sequence_lengths(problem, b)),
            b,
            h,
        ),
        None if lse_in_base_2 is None else sequence_queries(lse_in_base_2, problem, b),
        first,
        BLOCK_M,
        SIDE,
    )


@triton.jit
def store_key_factors(factors, head, first, BLOCK_N: tl.constexpr, SIDE: tl.constexpr):
    """Computes key_factors_kernel for one block of one sequence."""
    origin = key_origin(head, first, BLOCK_N, SIDE)
    difference = prefix_difference(origin, load_prefix_sums(head, first, BLOCK_N))
    address = tile_addresses(factors, head.b, head.h, first, BLOCK_N, FACTORS)
    tl.store(address, key_factors(difference[:, None]))


@triton.jit
def key_factors_kernel(factors, bias, problem, BLOCK_N: tl.constexpr, SIDE: tl.constexpr):
    """factors[b, h, j] = key_factors(C[j] - C[o]), where o is the origin of the tile of BLOCK_N
    keys.

    factors (B or 1, H or 1, n, FACTORS), n a multiple of BLOCK_N.
    """
    b, h = tl.program_id(0), tl.program_id(1)
    first = tl.program_id(2) * BLOCK_N
    if is_past_end(problem, b, first, N_KEY):
        return
    store_key_factors(
        sequence_keys(factors, problem, b),
        Head(
            SequenceBias(bias, per_token_operands(bias, problem, b)),
            SequenceProblem(problem, sequence_lengths(problem, b)),
            b,
            h,
        ),
        first,
        BLOCK_N,
        SIDE,
    )
