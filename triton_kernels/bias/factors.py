"""Represents a bias as a product of factors, which extend the product of queries and keys by one
step.

Matrix units multiply FACTORS columns at a time. A float32 number is the sum of three bfloat16
numbers, and a product of two numbers is, up to the rounding error of float32, the sum of six
products of these parts: six columns.

In a tile, beta_ij = g_i (C[p_i] - C[j]) = g_i (C[p_i] - C[o]) + g_i (C[o] - C[j]), where the origin
o is the key of the tile that is nearest to the queries. The second term is a product of factors.
The first is constant along the keys and is added to the offset of the softmax; or, where rows are
keys, it is three more columns, which also include the query's lse, but not the part that all
queries of the tile share. With any other origin, a large step could round away the small
differences within a tile.

Products of dS with the same columns give the gradients: those of the gain and of C[p] from the key
factors, those of C[j] from the query factors. They need only the first eight columns. If queries
have no gains of their own, these columns are the same in all tiles. table_polynomials.py has the
factors of tables, whose product is the whole bias.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import FACTORS, LOG2E, dot, position, row_address, tile_addresses
from ..sequences import (
    N_KEY,
    N_QUERY,
    OwnBias,
    OwnProblem,
    is_past_end,
    own_keys,
    own_lengths,
    own_queries,
    own_rows,
)
from .tile import first_distance, gains, load_prefix_sums, prefix_difference, prefix_sum_at

# The logit of a query without visible keys: finite, so that its bfloat16 parts are finite too.
MIN_LOGIT = tl.constexpr(-1e30)


@triton.jit
def parts(x, is_middle, is_low):
    """Returns one of three bfloat16 numbers whose sum is x with relative error 2^-24: the high
    part, or the one that is selected."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return tl.where(is_low, low, tl.where(is_middle, middle, high))


@triton.jit
def query_factors(x, y, COLUMNS: tl.constexpr = FACTORS):
    """Returns the columns high, high, high, middle, middle, low of x, then high, middle, low of y,
    then zeros, truncated to COLUMNS. [n, 1] to [n, COLUMNS]"""
    column = tl.arange(0, COLUMNS)[None, :]
    values = tl.where(column < 6, x, tl.where(column < 9, y, 0.0))
    is_middle = (column == 3) | (column == 4) | (column == 7)
    return parts(values, is_middle, (column == 5) | (column == 8))


@triton.jit
def key_factors(x, COLUMNS: tl.constexpr = FACTORS):
    """Returns the columns high, middle, low, high, middle, high of x, then three ones, then zeros,
    truncated to COLUMNS. [n, 1] to [n, COLUMNS]"""
    column = tl.arange(0, COLUMNS)[None, :]
    values = tl.where(column < 6, x, tl.where(column < 9, 1.0, 0.0))
    return parts(values, (column == 1) | (column == 4), column == 2)


@triton.jit
def tile_query_factors(
    bias,
    b,
    h,
    first,
    BLOCK_M: tl.constexpr,
    SIDE: tl.constexpr,
    remaining=None,
    COLUMNS: tl.constexpr = FACTORS,
):
    """Loads the factors of queries first, first + 1, ... for keys on side SIDE. [BLOCK_M, COLUMNS]

    remaining: see load_if.
    """
    # The factors of a table depend only on the query's row in the tile.
    row = first if bias.table is None else 0
    address = tile_addresses(bias.query_factors, b, h, row, BLOCK_M, COLUMNS)
    return load_if(address + (bias.query_factors.side if SIDE < 0 else 0), remaining)


@triton.jit
def tile_key_factors(
    bias,
    problem,
    b,
    h,
    p,
    j,
    BLOCK_N: tl.constexpr,
    SIDE: tl.constexpr,
    remaining=None,
    COLUMNS: tl.constexpr = FACTORS,
):
    """Loads the factors of keys j, j + 1, ..., all of which exist, for a tile of queries whose
    first position is p. [BLOCK_N, COLUMNS]

    remaining: see load_if.
    """
    row, step = j, FACTORS
    if bias.table is not None:
        row, step = p - j - first_distance(problem), -FACTORS
    address = row_address(bias.key_factors, b, h, 0) + row * bias.key_factors.row
    address += bias.key_factors.side if SIDE < 0 else 0
    n = tl.arange(0, BLOCK_N)[:, None]
    return load_if(address + (n * step + tl.arange(0, COLUMNS)[None, :]), remaining)


@triton.jit
def key_product(
    bias, problem, b, h, q_factors, p, j, BLOCK_N: tl.constexpr, SIDE: tl.constexpr, remaining=None
):
    """Returns the product of the factors of queries, whose first position is p, and of keys j, j +
    1, ...: the initial accumulator of the logits. [BLOCK_M, BLOCK_N]"""
    k_factors = tile_key_factors(bias, problem, b, h, p, j, BLOCK_N, SIDE, remaining)
    return dot(q_factors, tl.trans(k_factors))


@triton.jit
def query_product(
    bias, problem, b, h, i, p, j, q_factors, k_factors, BLOCK_M: tl.constexpr, SIDE: tl.constexpr
):
    """Returns the factors of queries i, i + 1, ..., whose first position is p, and of keys j, j +
    1, ..., and their product, [BLOCK_N, BLOCK_M]. Of the given factors of another tile of queries
    and the same keys, one is the same."""
    if bias.table is None:
        q_factors = tile_query_factors(bias, b, h, i, BLOCK_M, SIDE)
    else:
        k_factors = tile_key_factors(bias, problem, b, h, p, j, k_factors.shape[0], SIDE)
    return q_factors, k_factors, dot(k_factors, tl.trans(q_factors))


@triton.jit
def load_if(address, remaining):
    """Loads factors, or zeros if `remaining` <= 0, because then no tile follows and the address may
    be invalid. remaining=None loads unconditionally."""
    if remaining is None:
        factors = tl.load(address)
    else:
        row = tl.arange(0, address.shape[0])[:, None]
        factors = tl.load(address, row < tl.minimum(remaining, 1) * address.shape[0], other=0.0)
    return factors


@triton.jit
def next_tile(first, end, BLOCK: tl.constexpr):
    """Returns the start of the tile after the one at `first`, or of the last tile again."""
    # The result is never negative; stating so lets the compiler simplify addresses.
    return tl.maximum(tl.minimum(first + BLOCK, end - BLOCK), 0)


@triton.jit
def key_origin(bias, problem, b, h, j, BLOCK_N: tl.constexpr, SIDE: tl.constexpr):
    """Returns C at the origin of a tile of keys j, j + 1, ...: its key nearest to the queries."""
    return prefix_sum_at(bias, problem, b, h, j + BLOCK_N - 1 if SIDE > 0 else j)


@triton.jit
def query_origin(
    bias, problem, b, h, p, BLOCK_M: tl.constexpr, SIDE: tl.constexpr, EXISTS: tl.constexpr = False
):
    """Returns C at the origin of a tile of queries whose first position is p: its query nearest to
    the keys."""
    return prefix_sum_at(bias, problem, b, h, p if SIDE > 0 else p + BLOCK_M - 1, EXISTS)


@triton.jit
def store_query_factors(
    factors, bias, problem, lse_in_base_2, b, h, first, BLOCK_M: tl.constexpr, SIDE: tl.constexpr
):
    """Computes query_factors_kernel for one block of one sequence."""
    p_first = position(problem, first)
    i = first + tl.arange(0, BLOCK_M)
    gain = gains(bias, problem, b, h, first, BLOCK_M)
    rest = tl.zeros([BLOCK_M], tl.float32)
    if lse_in_base_2 is not None:
        lse = tl.load(row_address(lse_in_base_2, b, h, 0) + i, i < problem.n_query, other=0.0)
        sums = load_prefix_sums(bias, problem, b, h, p_first, BLOCK_M)
        difference = prefix_difference(
            query_origin(bias, problem, b, h, p_first, BLOCK_M, SIDE), sums
        )
        rest = ((SIDE * LOG2E) * gain * difference - lse) / problem.scale_in_base_2
        rest = tl.maximum(rest, MIN_LOGIT)
    values = query_factors((gain * (-SIDE / problem.scale))[:, None], rest[:, None])
    tl.store(tile_addresses(factors, b, h, first, BLOCK_M, FACTORS), values)


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
        own_queries(factors, problem, b),
        OwnBias(bias, own_rows(bias, problem, b)),
        OwnProblem(problem, own_lengths(problem, b)),
        None if lse_in_base_2 is None else own_queries(lse_in_base_2, problem, b),
        *(b, h, first, BLOCK_M, SIDE),
    )


@triton.jit
def store_key_factors(
    factors, bias, problem, b, h, first, BLOCK_N: tl.constexpr, SIDE: tl.constexpr
):
    """Computes key_factors_kernel for one block of one sequence."""
    origin = key_origin(bias, problem, b, h, first, BLOCK_N, SIDE)
    difference = prefix_difference(origin, load_prefix_sums(bias, problem, b, h, first, BLOCK_N))
    tl.store(
        tile_addresses(factors, b, h, first, BLOCK_N, FACTORS), key_factors(difference[:, None])
    )


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
        own_keys(factors, problem, b),
        OwnBias(bias, own_rows(bias, problem, b)),
        OwnProblem(problem, own_lengths(problem, b)),
        *(b, h, first, BLOCK_N, SIDE),
    )


@triton.jit
def times_factors(grad_s, factors, acc, IN_TWO: tl.constexpr):
    """Returns acc + grad_s @ factors. IN_TWO splits dS into two bfloat16 numbers, for float16
    inputs, whose precision exceeds that of bfloat16."""
    high = grad_s.to(tl.bfloat16)
    acc = dot(high, factors, acc)
    if IN_TWO:
        acc = dot((grad_s - high.to(tl.float32)).to(tl.bfloat16), factors, acc)
    return acc


@triton.jit
def round_to_operand(grad_s, IN_TWO: tl.constexpr):
    """Returns dS rounded as in times_factors, so that the contributions of a pair to the gradients
    of C[p] and of C[j] cancel exactly in the gradient of steps outside the pair.

    For float16 inputs, times_factors splits dS in two, and the rounding error is negligible.
    """
    return grad_s if IN_TWO else grad_s.to(tl.bfloat16).to(tl.float32)


@triton.jit
def shared_key_factors(BLOCK_N: tl.constexpr, SIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns the key factors of every tile of a linear bias, for which C[j] = j. For other biases
    only their columns of ones are used. [BLOCK_N, COLUMNS]"""
    from_origin = tl.arange(0, BLOCK_N) - (BLOCK_N - 1 if SIDE > 0 else 0)
    return key_factors(from_origin.to(tl.float32)[:, None], COLUMNS)


@triton.jit
def gain_factors(problem, gain, SIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns the query factors for the given gains, without lse. [BLOCK_M, COLUMNS]"""
    return query_factors((gain * (-SIDE / problem.scale))[:, None], 0.0, COLUMNS)


@triton.jit
def query_gradient_sums(sums, carried, difference, SIDE: tl.constexpr):
    """Returns the gradient of the gain, and the gradient of C[p] divided by the gain. [BLOCK_M]
    each.

    sums: dS times key factors, summed over tiles. carried: the same sum, in which each tile is
    weighted by C at the queries' origin minus C at the tile's origin. difference: C[p] minus C at
    the queries' origin.
    """
    column = tl.arange(0, sums.shape[1])[None, :]
    of_ones = tl.sum(tl.where(column == 6, sums, 0.0), 1)
    of_keys = tl.sum(tl.where(column < 3, sums, 0.0), 1)
    of_origins = tl.sum(tl.where(column == 6, carried, 0.0), 1)
    return SIDE * (difference * of_ones + of_origins - of_keys), SIDE * of_ones


@triton.jit
def key_gradient_sums(problem, sums):
    """Returns the gradient of C[j] from `sums`, dS times query factors. [BLOCK_N]"""
    column = tl.arange(0, sums.shape[1])[None, :]
    parts = (column == 0) | (column == 3) | (column == 5)
    return tl.sum(tl.where(parts, sums, 0.0), 1) * problem.scale
