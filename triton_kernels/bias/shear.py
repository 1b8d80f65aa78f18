"""Moves the elements of a tile between the order of its pairs and that of their distances.

Where Triton gathers along one of two dimensions, a warp shuffles, for each element, all elements
that a thread has of a row. Where it gathers from a flattened tile, it writes to shared memory and
reads each element once, which these functions use.

The order of a flattened tile decides about bank conflicts. Its lowest bits are the lowest three of
the row and, above them, the second and third of the column. In accumulators of warp and warp group
products, these bits belong to the lanes of a warp, so that a warp writes to 32 banks; and the
elements that it reads, along diagonals, are in 32 banks too.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Numbers(NamedTuple):
    """Numbers of rows or columns, 8 high + low, which broadcast to [rows // 8, 8, columns // 8, 8].
    Addresses are linear in `high`, so that registers of a thread differ by constants in them."""

    high: tl.tensor
    low: tl.tensor


@triton.jit
def row_numbers(ROWS: tl.constexpr):
    high, low = tl.arange(0, ROWS // 8), tl.arange(0, 8)
    return Numbers(high[:, None, None, None], low[None, :, None, None])


@triton.jit
def column_numbers(COLUMNS: tl.constexpr):
    high, low = tl.arange(0, COLUMNS // 8), tl.arange(0, 8)
    return Numbers(high[None, None, :, None], low[None, None, None, :])


@triton.jit
def difference(x, y, COUNT: tl.constexpr):
    """Returns x - y + COUNT - 1."""
    return Numbers(x.high - y.high + (COUNT // 8 - 1), x.low - y.low + 7)


@triton.jit
def sum_above(x, y, COUNT: tl.constexpr):
    """Returns x + y - (COUNT - 1)."""
    return Numbers(x.high + y.high - COUNT // 8, x.low + y.low + 1)


@triton.jit
def elements(tile, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns the elements of a tile at the given rows and columns, [ROWS, COLUMNS]."""
    HEIGHT: tl.constexpr = tile.shape[0]
    WIDTH: tl.constexpr = tile.shape[1]
    parts = tl.reshape(tile, [HEIGHT // 8, 8, WIDTH // 2, 2])
    flat = tl.reshape(tl.permute(parts, [3, 0, 2, 1]), [HEIGHT * WIDTH])
    place = (column.low & 1) * (HEIGHT * WIDTH // 2) + (row.high + (row.low >> 3)) * (WIDTH * 4)
    place += (column.high * 4 + (column.low >> 1)) * 8 + (row.low & 7)
    found = tl.gather(flat, tl.reshape(place, [ROWS * COLUMNS]), 0)
    return tl.reshape(found, [ROWS, COLUMNS])


@triton.jit
def elements_or_zeros(tile, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The same, with zeros beside the columns of the tile. The larger of ROWS and COLUMNS is the
    number of distances, which exceeds that of the zeros on either side."""
    COUNT: tl.constexpr = ROWS if ROWS > COLUMNS else COLUMNS
    WIDTH: tl.constexpr = tile.shape[1]
    shifted = Numbers(column.high + (COUNT - WIDTH) // 8, column.low)
    padded = with_zeros(preceded_by_zeros(tile, COUNT), BEFORE=False)
    return elements(padded, row, shifted, ROWS, COLUMNS)


@triton.jit
def preceded_by_zeros(tile, WIDTH: tl.constexpr):
    if tile.shape[1] < WIDTH:
        tile = preceded_by_zeros(with_zeros(tile, BEFORE=True), WIDTH)
    return tile


@triton.jit
def with_zeros(tile, BEFORE: tl.constexpr):
    """Returns a tile with as many columns of zeros before it or after it."""
    zeros = tl.zeros_like(tile)
    both = tl.join(zeros, tile) if BEFORE else tl.join(tile, zeros)
    return tl.reshape(tl.permute(both, [0, 2, 1]), [tile.shape[0], 2 * tile.shape[1]])
