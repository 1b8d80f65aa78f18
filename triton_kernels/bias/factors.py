"""A bias as factors of one more step of the product of queries and keys.

Matrix units take FACTORS columns at a time. A number is the sum of three bfloat16 numbers, and the
product of two numbers that of six products of their parts, up to float32's rounding: six columns.

In a tile, beta_ij = g_i (C[p_i] - C[j]) is g_i times C[j], counted from the tile's key that is
nearest to the queries, and what is one number a query. That number joins the softmax; or, where
rows are keys, it is three more columns, along with the query's lse, but for its part that all
queries share. What a large step would round away, were C counted from elsewhere, it hides.

The same columns, multiplied with dS, give the sums of the gradients: those of the keys' numbers
over keys, of the queries' numbers over queries. The first eight of them do; where queries have no
gains of their own, tiles have these alike. Tables have factors of their own: table_polynomials.py.
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
    is_beyond,
    own_keys,
    own_lengths,
    own_queries,
    own_rows,
)
from .tile import first_distance, gains, prefix_difference, sum_at, sums_from

# Finite, so that its parts are: a logit of a query without weights.
LEAST = tl.constexpr(-1e30)


@triton.jit
def parts(x, is_middle, is_low):
    """The first of three bfloat16 numbers that add up to x, but for 2^-24 of it, or another."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return tl.where(is_low, low, tl.where(is_middle, middle, high))


@triton.jit
def query_factors(x, y, COLUMNS: tl.constexpr = FACTORS):
    """Columns high, high, high, middle, middle, low of x, high, middle, low of y, and zeros.

    [n, 1] to [n, COLUMNS], as many of them.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    values = tl.where(column < 6, x, tl.where(column < 9, y, 0.0))
    is_middle = (column == 3) | (column == 4) | (column == 7)
    return parts(values, is_middle, (column == 5) | (column == 8))


@triton.jit
def key_factors(x, COLUMNS: tl.constexpr = FACTORS):
    """Columns high, middle, low, high, middle, high of x, three ones, and zeros.

    [n, 1] to [n, COLUMNS], as many of them.
    """
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
    """Those of BLOCK_M queries, where all keys are on the side SIDE. [BLOCK_M, COLUMNS]

    remaining: see load_if.
    """
    # Of a table, queries have the factors of their row in the tile.
    row = 0 if bias.form == "distance" else first
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
    """Those of keys j, j + 1, ..., all there, for queries from position p on. [BLOCK_N, COLUMNS]

    remaining: see load_if.
    """
    row, step = j, FACTORS
    if bias.form == "distance":
        row, step = p - j - first_distance(problem), -FACTORS
    address = row_address(bias.key_factors, b, h, 0) + row * bias.key_factors.row
    address += bias.key_factors.side if SIDE < 0 else 0
    n = tl.arange(0, BLOCK_N)[:, None]
    return load_if(address + (n * step + tl.arange(0, COLUMNS)[None, :]), remaining)


@triton.jit
def key_product(
    bias, problem, b, h, q_factors, p, j, BLOCK_N: tl.constexpr, SIDE: tl.constexpr, remaining=None
):
    """The product of the factors of queries from position p on with those of keys j, j + 1, ...

    [BLOCK_M, BLOCK_N], what the logits of a tile are started with.
    """
    k_factors = tile_key_factors(bias, problem, b, h, p, j, BLOCK_N, SIDE, remaining)
    return dot(q_factors, tl.trans(k_factors))


@triton.jit
def load_if(address, remaining):
    """Factors, or zeros where no rows remain in the tiles that need them: there may be none."""
    if remaining is None:
        factors = tl.load(address)
    else:
        row = tl.arange(0, address.shape[0])[:, None]
        factors = tl.load(address, row < tl.minimum(remaining, 1) * address.shape[0], other=0.0)
    return factors


@triton.jit
def following(first, end, BLOCK: tl.constexpr):
    """Where the tile after that from `first` on begins, or the last one again."""
    # It is not negative anyway; a compiler that knows computes addresses in fewer steps.
    return tl.maximum(tl.minimum(first + BLOCK, end - BLOCK), 0)


@triton.jit
def key_origin(bias, problem, b, h, j, BLOCK_N: tl.constexpr, SIDE: tl.constexpr):
    """C at the key from which it is counted in the tile of keys j, j + 1, ..."""
    return sum_at(bias, problem, b, h, j + BLOCK_N - 1 if SIDE > 0 else j)


@triton.jit
def query_origin(
    bias, problem, b, h, p, BLOCK_M: tl.constexpr, SIDE: tl.constexpr, EXISTS: tl.constexpr = False
):
    """C at the query from which it is counted in the tile of queries from position p on."""
    return sum_at(bias, problem, b, h, p if SIDE > 0 else p + BLOCK_M - 1, EXISTS)


@triton.jit
def store_query_factors(
    factors, bias, problem, lse_in_base_2, b, h, first, BLOCK_M: tl.constexpr, SIDE: tl.constexpr
):
    """What query_factors_kernel does, of a block of one sequence."""
    p_first = position(problem, first)
    i = first + tl.arange(0, BLOCK_M)
    gain = gains(bias, problem, b, h, first, BLOCK_M)
    rest = tl.zeros([BLOCK_M], tl.float32)
    if lse_in_base_2 is not None:
        lse = tl.load(row_address(lse_in_base_2, b, h, 0) + i, i < problem.n_query, other=0.0)
        sums = sums_from(bias, problem, b, h, p_first, BLOCK_M)
        difference = prefix_difference(
            query_origin(bias, problem, b, h, p_first, BLOCK_M, SIDE), sums
        )
        rest = ((SIDE * LOG2E) * gain * difference - lse) / problem.scale_in_base_2
        rest = tl.maximum(rest, LEAST)
    values = query_factors((gain * (-SIDE / problem.scale))[:, None], rest[:, None])
    tl.store(tile_addresses(factors, b, h, first, BLOCK_M, FACTORS), values)


@triton.jit
def query_factors_kernel(
    factors, bias, problem, lse_in_base_2, BLOCK_M: tl.constexpr, SIDE: tl.constexpr
):
    """Those of blocks of BLOCK_M queries, lse included where it is given.

    factors (B or 1, H or 1, n, FACTORS), n a multiple of BLOCK_M: a row a query or, where all
    queries have the same, BLOCK_M rows.
    """
    b, h = tl.program_id(0), tl.program_id(1)
    first = tl.program_id(2) * BLOCK_M
    if is_beyond(problem, b, first, N_QUERY):
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
    """What key_factors_kernel does, of a block of one sequence."""
    origin = key_origin(bias, problem, b, h, first, BLOCK_N, SIDE)
    difference = prefix_difference(origin, sums_from(bias, problem, b, h, first, BLOCK_N))
    tl.store(
        tile_addresses(factors, b, h, first, BLOCK_N, FACTORS), key_factors(difference[:, None])
    )


@triton.jit
def key_factors_kernel(factors, bias, problem, BLOCK_N: tl.constexpr, SIDE: tl.constexpr):
    """Those of tiles of BLOCK_N keys. (B or 1, H or 1, n, FACTORS), n a multiple of BLOCK_N."""
    b, h = tl.program_id(0), tl.program_id(1)
    first = tl.program_id(2) * BLOCK_N
    if is_beyond(problem, b, first, N_KEY):
        return
    store_key_factors(
        own_keys(factors, problem, b),
        OwnBias(bias, own_rows(bias, problem, b)),
        OwnProblem(problem, own_lengths(problem, b)),
        *(b, h, first, BLOCK_N, SIDE),
    )


@triton.jit
def times_factors(grad_s, factors, acc, IN_TWO: tl.constexpr):
    """acc + grad_s factors. IN_TWO: for float16 inputs, which have more bits than a bfloat16."""
    high = grad_s.to(tl.bfloat16)
    acc = dot(high, factors, acc)
    if IN_TWO:
        acc = dot((grad_s - high.to(tl.float32)).to(tl.bfloat16), factors, acc)
    return acc


@triton.jit
def alike_key_factors(BLOCK_N: tl.constexpr, SIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """Those of a tile of keys, where C is the position; where it is not, only their ones count."""
    from_origin = tl.arange(0, BLOCK_N) - (BLOCK_N - 1 if SIDE > 0 else 0)
    return key_factors(from_origin.to(tl.float32)[:, None], COLUMNS)


@triton.jit
def gain_factors(problem, gain, SIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """Those of queries with these gains. [BLOCK_M, COLUMNS]"""
    return query_factors((gain * (-SIDE / problem.scale))[:, None], 0.0, COLUMNS)


@triton.jit
def query_gradient_sums(sums, carried, way, SIDE: tl.constexpr):
    """The gradients of the gain and, still to be multiplied by it, of C[p]. [BLOCK_M] each.

    sums: those of dS times key factors over all tiles. carried: those of each tile, times the way
    of C from its origin to that of the queries, from which it is way to C[p].
    """
    column = tl.arange(0, sums.shape[1])[None, :]
    of_ones = tl.sum(tl.where(column == 6, sums, 0.0), 1)
    of_keys = tl.sum(tl.where(column < 3, sums, 0.0), 1)
    of_origins = tl.sum(tl.where(column == 6, carried, 0.0), 1)
    return SIDE * (way * of_ones + of_origins - of_keys), SIDE * of_ones


@triton.jit
def key_gradient_sums(problem, sums):
    """The gradient of C[j], from dS times query factors."""
    column = tl.arange(0, sums.shape[1])[None, :]
    parts = (column == 0) | (column == 3) | (column == 5)
    return tl.sum(tl.where(parts, sums, 0.0), 1) * problem.scale
