"""Factors of a distance table where it is smooth, which most tables are far from distance 0.

Down the rows of a tile, such a table is a polynomial of the row: queries have the Chebyshev
polynomials T_0 to T_4 of their row in the tile, keys the coefficients, which depend on how far they
are from the tile's first query. Each product has as many columns as its size asks for (factors.py).

A polynomial through five rows of the table is compared with all of them. Where a logit in base 2
would differ by more than half precision shows, the table itself is read.
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
# Of a logit in base 2: an eighth of the rounding of a float16, and of the logit itself, which
# float32 holds to 2^-24.
TABLE_ERROR = tl.constexpr(2.0**-14)
RELATIVE_ERROR = tl.constexpr(2.0**-21)
TABLE_ROWS = 64  # of a program


@functools.cache
def interpolation(rows: int) -> tuple[tuple[int, ...], tuple[tuple[float, ...], ...]]:
    """Five rows of a tile, and [degree][row]: what their values add to a coefficient."""
    ideal = [math.cos((2 * k + 1) * math.pi / 10) for k in range(DEGREES.value)]
    nodes = [round((rows - 1 - rows * x) / 2) for x in ideal]
    x = [(2 * node + 1 - rows) / rows for node in nodes]
    angles = torch.tensor(x, dtype=torch.float64, device="cpu").acos()
    polynomials = (angles[:, None] * torch.arange(DEGREES.value, device="cpu")).cos()
    return tuple(nodes), tuple(map(tuple, polynomials.inverse().tolist()))


@triton.jit
def by_degree(c0, c1, c2, c3, c4):
    """Five numbers or columns, laid out as the factors' columns: [n, FACTORS]."""
    column = tl.arange(0, FACTORS)[None, :]
    high = tl.where(column < 14, c3, c4)
    return tl.where(column < 3, c0, tl.where(column < 6, c1, tl.where(column < 11, c2, high)))


@triton.jit
def row_factors(ROWS: tl.constexpr):
    """Chebyshev polynomials of the rows of a tile. [ROWS, FACTORS]"""
    column = tl.arange(0, FACTORS)[None, :]
    x = ((2 * tl.arange(0, ROWS) + 1 - ROWS).to(tl.float32) / ROWS)[:, None]
    square = x * x
    degrees = by_degree(1.0, x, 2 * square - 1, (4 * square - 3) * x, 8 * square * (square - 1) + 1)
    is_middle = (column == 9) | (column == 10) | (column == 13)
    return parts(degrees, is_middle, column < 0)


@triton.jit
def coefficient_factors(coefficients):
    """[n, FACTORS], laid out by degree."""
    column = tl.arange(0, FACTORS)[None, :]
    is_middle = (column == 1) | (column == 4) | (column == 7) | (column == 10)
    is_middle |= (column == 12) | (column == 15)
    return parts(coefficients, is_middle, (column == 2) | (column == 5) | (column == 8))


@triton.jit
def table_factors_kernel(
    of_rows,
    of_keys,
    rough,
    bias,
    problem,
    length,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
    INTERPOLATION: tl.constexpr,
):
    """The factors of tiles of ROWS queries, and which keys need the table itself.

    of_rows (1, 1, ROWS, FACTORS). of_keys (B or 1, H or 1, length - ROWS + 1, FACTORS): at x those
    of a key whose distance to the first query has the place x in the table. rough (B or 1, H or 1,
    blocks, 2): the first and the last x of a block that needs the table, or length and -1.
    """
    b, h = tl.program_id(0), tl.program_id(1)
    first = tl.program_id(2) * BLOCK
    x = first + tl.arange(0, BLOCK)
    exists = x <= length - ROWS
    table = row_address(bias.terms, b, h, 0)
    coefficients = tl.zeros([BLOCK, FACTORS], tl.float32)
    for node in tl.static_range(DEGREES):
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
        tl.store(tile_addresses(of_rows, 0, 0, 0, ROWS, FACTORS), rows)
    tl.store(tile_addresses(of_keys, b, h, first, BLOCK, FACTORS), keys, exists[:, None])

    found = dot(keys, tl.trans(rows)) * problem.scale_in_base_2
    expected = tl.load(table + x[:, None] + tl.arange(0, ROWS)[None, :], exists[:, None])
    # NaN and infinity are errors too.
    error = tl.abs(found - expected)
    right = (error <= TABLE_ERROR + RELATIVE_ERROR * tl.abs(expected)) & (error < INFINITY)
    good = tl.sum(right.to(tl.int32), 1) == ROWS
    is_rough = exists & (good == 0)
    block = row_address(rough, b, h, tl.program_id(2))
    tl.store(block, tl.min(tl.where(is_rough, x, length), 0))
    tl.store(block + 1, tl.max(tl.where(is_rough, x, -1), 0))
