"""What every kernel does: find a tile, load it, mask it, multiply it."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..limits import PLAN_QUERIES

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
INFINITY = tl.constexpr(math.inf)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
# Columns of one extra step of a matrix product.
FACTORS = tl.constexpr(16)
# Queries of a tile of a plan; blocks of queries are at most as large.
PLAN_TILE = tl.constexpr(PLAN_QUERIES)


@triton.jit
def dot(a, b, acc=None):
    """acc + a b, accumulated in float32; products of float32 are exact to float32."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def group_and_block(problem, LAST_FIRST: tl.constexpr):
    """The heads and the block of this program. Programs with most to do start first: the last
    queries, which see most keys; the first keys; or those that a plan puts first."""
    group, block = tl.program_id(0), tl.program_id(1)
    if problem.plan is not None:
        number = tl.load(problem.plan.order + block * tl.num_programs(0) + group)
        group, block = number // tl.num_programs(1), number % tl.num_programs(1)
    elif LAST_FIRST:
        block = tl.num_programs(1) - 1 - block
    return group, block


@triton.jit
def position(problem, query):
    return query + problem.n_key - problem.n_query + problem.shift


@triton.jit
def row_address(x, b, h, n):
    """Of row n of batch entry b, head h."""
    b, h, n = tl.cast(b, tl.int64), tl.cast(h, tl.int64), tl.cast(n, tl.int64)
    return x.start + (b * x.batch + h * x.head + n * x.row)


@triton.jit
def tile_addresses(
    x, b, h, first, ROWS: tl.constexpr, CHANNELS: tl.constexpr, NEAR: tl.constexpr = False
):
    """Of rows first, first + 1, ..., which are less than 2^31 elements apart; with NEAR, from row 0
    on.  [ROWS, CHANNELS]"""
    row, channel = tl.arange(0, ROWS)[:, None], tl.arange(0, CHANNELS)[None, :]
    if NEAR:
        address = row_address(x, b, h, 0) + ((first + row) * x.row + channel)
    else:
        address = row_address(x, b, h, first) + (row * x.row + channel)
    return address


@triton.jit
def tile_mask(first, n_rows, DIM: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    row, channel = tl.arange(0, ROWS)[:, None], tl.arange(0, CHANNELS)[None, :]
    return (first + row < n_rows) & (channel < DIM)


@triton.jit
def load_tile(
    x,
    b,
    h,
    first,
    n_rows,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    EDGE: tl.constexpr = True,
    NEAR: tl.constexpr = False,
):
    """Rows first, first + 1, ..., zero beyond n_rows and DIM. Without EDGE all rows are there.

    NEAR: see tile_addresses.
    """
    address = tile_addresses(x, b, h, first, ROWS, CHANNELS, NEAR)
    if EDGE:
        tile = tl.load(address, tile_mask(first, n_rows, DIM, ROWS, CHANNELS), other=0.0)
    elif DIM != CHANNELS:
        tile = tl.load(address, tl.arange(0, CHANNELS)[None, :] < DIM, other=0.0)
    else:
        tile = tl.load(address)
    return tile


@triton.jit
def load_numbers(x, problem, b, h, first, other, BLOCK_M: tl.constexpr, EDGE: tl.constexpr = True):
    """One a query, [BLOCK_M]; beyond the last, `other`. Without EDGE all queries are there."""
    n = tl.arange(0, BLOCK_M)
    exists = first + n < problem.n_query if EDGE else tl.full([BLOCK_M], True, tl.int1)
    return tl.load(row_address(x, b, h, first) + n * x.row, exists, other=other)


@triton.jit
def store_tile(x, b, h, first, n_rows, tile, DIM: tl.constexpr):
    ROWS: tl.constexpr = tile.shape[0]
    CHANNELS: tl.constexpr = tile.shape[1]
    address = tile_addresses(x, b, h, first, ROWS, CHANNELS)
    mask = tile_mask(first, n_rows, DIM, ROWS, CHANNELS)
    tl.store(address, tile.to(x.start.dtype.element_ty), mask)


@triton.jit
def keys_taken(problem, b, h, first):
    """The first key that the plan leaves to the tile of queries from `first` on, and the end."""
    begin, end = 0, problem.n_key
    if problem.plan is not None:
        keys = row_address(problem.plan.keys, b, h, first // PLAN_TILE)
        begin, end = tl.load(keys), tl.load(keys + 1)
    return begin, end


@triton.jit
def visible(problem, p, j, begin, end):
    """Whether a query at position p, which may lie beyond the last query, sees and takes key j."""
    sees = (j < end) & (p < problem.n_key + problem.shift)
    if problem.plan is not None:
        sees &= j >= begin
    if problem.causal:
        sees &= j <= p
    if problem.windowed:
        sees &= p - j < problem.window
    return sees


@triton.jit
def round_down(n, SIZE: tl.constexpr):
    """The last multiple of SIZE that is at most n, or 0."""
    return tl.maximum(n, 0) // SIZE * SIZE


@triton.jit
def round_up(n, SIZE: tl.constexpr):
    return round_down(n + SIZE - 1, SIZE)
