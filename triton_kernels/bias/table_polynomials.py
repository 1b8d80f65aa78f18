"""Factors of a distance table where it is smooth, as most tables are at large distances.

Along the rows of a tile, a smooth table is approximated by a polynomial of degree 4 in the row. The
factors of queries are the Chebyshev polynomials T_0 to T_4 of their row in the tile; those of keys
are the coefficients, which depend on the distance of the key to the tile's first query. The number
of columns per product depends on its size (factors.py).

The polynomial interpolates the table at five rows and is compared with it at all rows. Where a
logit in base 2 would differ by more than the precision of half-precision inputs, the table itself
is read.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl

from ..primitives import FACTORS, INFINITY, dot, row_address, tile_addresses
from .factors import parts

DEGREES = tl.constexpr(5)
# The permitted error of a logit in base 2: absolute, an eighth of the rounding error of float16;
# and relative to the logit, whose own rounding error in float32 is 2^-24.
TABLE_ERROR = tl.constexpr(2.0**-14)
RELATIVE_ERROR = tl.constexpr(2.0**-21)
TABLE_ROWS = 64  # table entries per program


@functools.cache
def interpolation(rows: int) -> tuple[tuple[int, ...], tuple[tuple[float, ...], ...]]:
    """Returns five rows of a tile near the Chebyshev nodes, and the weights [degree][node] that map
    the table's values there to the coefficients."""
    ideal = [math.cos((2 * k + 1) * math.pi / 10) for k in range(DEGREES.value)]
    nodes = [round((rows - 1 - rows * x) / 2) for x in ideal]
    x = [(2 * node + 1 - rows) / rows for node in nodes]
    angles = torch.tensor(x, dtype=torch.float64, device="cpu").acos()
    polynomials = (angles[:, None] * torch.arange(DEGREES.value, device="cpu")).cos()
    return tuple(nodes), tuple(map(tuple, polynomials.inverse().tolist()))


@triton.jit
def by_degree(c0, c1, c2, c3, c4):
    """Returns c0 to c4, numbers or columns [n, 1], in the columns of factors of their degree.
    [n, FACTORS]"""
    column = tl.arange(0, FACTORS)[None, :]
    high = tl.where(column < 14, c3, c4)
    return tl.where(column < 3, c0, tl.where(column < 6, c1, tl.where(column < 11, c2, high)))


@triton.jit
def row_factors(ROWS: tl.constexpr):
    """Returns the factors of queries: Chebyshev polynomials of the rows of a tile. [ROWS,
    FACTORS]"""
    column = tl.arange(0, FACTORS)[None, :]
    x = ((2 * tl.arange(0, ROWS) + 1 - ROWS).to(tl.float32) / ROWS)[:, None]
    square = x * x
    degrees = by_degree(1.0, x, 2 * square - 1, (4 * square - 3) * x, 8 * square * (square - 1) + 1)
    is_middle = (column == 9) | (column == 10) | (column == 13)
    return parts(degrees, is_middle, column < 0)


@triton.jit
def coefficient_factors(coefficients):
    """Returns the factors of keys; `coefficients` is laid out by by_degree. [n, FACTORS]"""
    column = tl.arange(0, FACTORS)[None, :]
    is_middle = (column == 1) | (column == 4) | (column == 7) | (column == 10)
    is_middle |= (column == 12) | (column == 15)
    return parts(coefficients, is_middle, (column == 2) | (column == 5) | (column == 8))


@triton.jit
def table_factors_kernel(
    q_factors,
    k_factors,
    unfactored,
    bias,
    problem,
    length,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
    INTERPOLATION: tl.constexpr,
):
    """q_factors[r] . k_factors[x] * scale_in_base_2 = table[x + r], for tiles of ROWS queries and
    all x except those in `unfactored`.

    q_factors (1, 1, ROWS, FACTORS). k_factors (B or 1, H or 1, length - ROWS + 1, FACTORS): x is
    the table index of the distance from the key to the tile's first query. unfactored (B or 1, H or
    1, blocks, 2): the first and the last x of each block for which the equation fails, or length
    and -1.
    """
    b, h = tl.program_id(0), tl.program_id(1)
    first = tl.program_id(2) * BLOCK
    x = first + tl.arange(0, BLOCK)
    exists = x <= length - ROWS
    table = row_address(bias.table, b, h, 0)
    coefficients = tl.zeros([BLOCK, FACTORS], tl.float32)
    for node in tl.static_range(DEGREES):
        # [BLOCK]
        values = tl.load(table + x + NODES[node], exists, other=0.0)
        weights = by_degree(
            INTERPOLATION[0][node],
            INTERPOLATION[1][node],
            INTERPOLATION[2][node],
            INTERPOLATION[3][node],
            INTERPOLATION[4][node],
        )
        coefficients += weights * values[:, None]
    rows = row_factors(ROWS)
    keys = coefficient_factors(coefficients / problem.scale_in_base_2)
    if (b == 0) & (h == 0) & (first == 0):
        tl.store(tile_addresses(q_factors, 0, 0, 0, ROWS, FACTORS), rows)
    tl.store(tile_addresses(k_factors, b, h, first, BLOCK, FACTORS), keys, exists[:, None])

    found = dot(keys, tl.trans(rows)) * problem.scale_in_base_2
    # [BLOCK, ROWS]
    expected = tl.load(table + x[:, None] + tl.arange(0, ROWS)[None, :], exists[:, None])
    # NaN and infinity count as errors.
    error = tl.abs(found - expected)
    right = (error <= TABLE_ERROR + RELATIVE_ERROR * tl.abs(expected)) & (error < INFINITY)
    good = tl.sum(right.to(tl.int32), 1) == ROWS
    is_unfactored = exists & (good == 0)
    block = row_address(unfactored, b, h, tl.program_id(2))
    tl.store(block, tl.min(tl.where(is_unfactored, x, length), 0))
    tl.store(block + 1, tl.max(tl.where(is_unfactored, x, -1), 0))
