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

from ..primitives import FACTORS, dot, row_address, tile_addresses
from .tile import first_distance, prefix_sum_at


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
    head,
    first,
    BLOCK_M: tl.constexpr,
    SIDE: tl.constexpr,
    remaining=None,
    COLUMNS: tl.constexpr = FACTORS,
):
    """Loads the factors of queries first, first + 1, ... for keys on side SIDE. [BLOCK_M, COLUMNS]

    remaining: see load_if.
    """
    factors = head.bias.query_factors
    # The factors of a table depend only on the query's row in the tile.
    row = first if head.bias.table is None else 0
    address = tile_addresses(factors, head.b, head.h, row, BLOCK_M, COLUMNS)
    return load_if(address + (factors.side if SIDE < 0 else 0), remaining)


@triton.jit
def tile_key_factors(
    head,
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
    factors = head.bias.key_factors
    row, step = j, FACTORS
    if head.bias.table is not None:
        row, step = p - j - first_distance(head.problem), -FACTORS
    address = row_address(factors, head.b, head.h, 0) + row * factors.row
    address += factors.side if SIDE < 0 else 0
    n = tl.arange(0, BLOCK_N)[:, None]
    return load_if(address + (n * step + tl.arange(0, COLUMNS)[None, :]), remaining)


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
def key_origin(head, j, BLOCK_N: tl.constexpr, SIDE: tl.constexpr):
    """Returns C at the origin of a tile of keys j, j + 1, ...: its key nearest to the queries."""
    return prefix_sum_at(head, j + BLOCK_N - 1 if SIDE > 0 else j)


@triton.jit
def query_origin(head, p, BLOCK_M: tl.constexpr, SIDE: tl.constexpr, EXISTS: tl.constexpr = False):
    """Returns C at the origin of a tile of queries whose first position is p: its query nearest to
    the keys."""
    return prefix_sum_at(head, p if SIDE > 0 else p + BLOCK_M - 1, EXISTS)


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
def query_gradient_sums(plain, weighted, difference, SIDE: tl.constexpr):
    """Returns the gradient of the gain, and the gradient of C[p] divided by the gain. [BLOCK_M]
    each.

    plain, weighted: see QueryProducts. difference: C[p] minus C at the queries' origin.
    """
    column = tl.arange(0, plain.shape[1])[None, :]
    ones = tl.sum(tl.where(column == 6, plain, 0.0), 1)
    keys = tl.sum(tl.where(column < 3, plain, 0.0), 1)
    origins = tl.sum(tl.where(column == 6, weighted, 0.0), 1)
    return SIDE * (difference * ones + origins - keys), SIDE * ones


@triton.jit
def key_gradient_sums(problem, sums):
    """Returns the gradient of C[j] from `sums`, dS times query factors. [BLOCK_N]"""
    column = tl.arange(0, sums.shape[1])[None, :]
    parts = (column == 0) | (column == 3) | (column == 5)
    return tl.sum(tl.where(parts, sums, 0.0), 1) * problem.scale
