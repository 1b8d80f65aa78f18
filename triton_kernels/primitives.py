"""Device functions of all kernels: addresses, loads, masks and matrix products of tiles."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from .. import shared_constants
from ..shared_constants import PLAN_QUERIES

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
INFINITY = tl.constexpr(math.inf)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
LARGEST_GAIN = tl.constexpr(shared_constants.LARGEST_GAIN)
# Columns of one step of a matrix product.
FACTORS = tl.constexpr(16)
# Queries per plan tile; blocks of queries are at most as large.
PLAN_TILE = tl.constexpr(PLAN_QUERIES)


@triton.jit
def dot(a, b, acc=None):
    """Returns acc + a @ b, accumulated in float32; float32 operands are not rounded to TF32."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def in_base_2(x):
    """Returns natural logits in base 2, float32. It saturates: finite logits stay finite, so that
    only -inf, which masks, has weight 0 in a row where all logits are low."""
    if x.dtype == tl.float32:
        return libdevice.mul_rz(x, LOG2E)  # rounding towards zero saturates, and keeps infinities
    y = (x * LOG2E).to(tl.float32)
    return tl.where(tl.abs(x) == INFINITY, y, limited(y, -LOWEST))


@triton.jit
def limited_gain(x):
    """Returns slopes or gains, or beta of -log(1 + beta^2), saturated."""
    return limited(x, LARGEST_GAIN)


@triton.jit
def limited(x, largest):
    """Returns x, of float32, within [-largest, largest], or NaN."""
    return tl.clamp(x, -largest, largest, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def group_and_block(problem, LAST_FIRST: tl.constexpr):
    """Returns the head group and the block of this program. Programs with the most work start
    first: the last queries, the first keys, or the order of a plan."""
    group, block = tl.program_id(0), tl.program_id(1)
    if problem.plan is not None:
        number = tl.load(problem.plan.order + block * tl.num_programs(0) + group)
        group, block = number // tl.num_programs(1), number % tl.num_programs(1)
    elif LAST_FIRST:
        block = tl.num_programs(1) - 1 - block
    return group, block


@triton.jit
def position(problem, query):
    """Returns the position of a query, counted from the first key."""
    return query + problem.n_key - problem.n_query + problem.shift


@triton.jit
def row_address(x, b, h, n):
    """Returns the address of row n of batch entry b, head h."""
    b, h, n = tl.cast(b, tl.int64), tl.cast(h, tl.int64), tl.cast(n, tl.int64)
    return x.start + (b * x.batch + h * x.head + n * x.row)


@triton.jit
def tile_addresses(
    x, b, h, first, ROWS: tl.constexpr, CHANNELS: tl.constexpr, NARROW: tl.constexpr = False
):
    """Returns the addresses of rows first, first + 1, ... [ROWS, CHANNELS]

    Offsets are 32-bit integers: relative to row `first`, or with NARROW to row 0 of the head.
    """
    row, channel = tl.arange(0, ROWS)[:, None], tl.arange(0, CHANNELS)[None, :]
    if NARROW:
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
    NARROW: tl.constexpr = False,
):
    """Loads rows first, first + 1, ..., zero beyond n_rows and DIM. [ROWS, CHANNELS]

    Without EDGE, all rows must exist. NARROW: see tile_addresses.
    """
    address = tile_addresses(x, b, h, first, ROWS, CHANNELS, NARROW)
    if EDGE:
        tile = tl.load(address, tile_mask(first, n_rows, DIM, ROWS, CHANNELS), other=0.0)
    elif DIM != CHANNELS:
        tile = tl.load(address, tl.arange(0, CHANNELS)[None, :] < DIM, other=0.0)
    else:
        tile = tl.load(address)
    return tile


@triton.jit
def load_queries(
    x,
    head,
    first,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    EDGE: tl.constexpr = True,
    NARROW: tl.constexpr = False,
):
    """Loads queries first, first + 1, ... of a head, as load_tile does."""
    n = head.problem.n_query
    return load_tile(x, head.b, head.h, first, n, DIM, ROWS, CHANNELS, EDGE, NARROW)


@triton.jit
def load_keys(
    x,
    head,
    first,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    EDGE: tl.constexpr = True,
    NARROW: tl.constexpr = False,
):
    """Loads keys first, first + 1, ... of the key head of a head, as load_tile does."""
    kv_head, n = head.h // head.problem.group, head.problem.n_key
    return load_tile(x, head.b, kv_head, first, n, DIM, ROWS, CHANNELS, EDGE, NARROW)


@triton.jit
def load_numbers(x, head, first, other, BLOCK_M: tl.constexpr, EDGE: tl.constexpr = True):
    """Loads one number per query, `other` beyond the last query. [BLOCK_M]

    Without EDGE, all queries must exist.
    """
    n = tl.arange(0, BLOCK_M)
    exists = first + n < head.problem.n_query if EDGE else tl.full([BLOCK_M], True, tl.int1)
    return tl.load(row_address(x, head.b, head.h, first) + n * x.row, exists, other=other)


@triton.jit
def store_tile(x, b, h, first, n_rows, tile, DIM: tl.constexpr):
    """Stores the part of a tile within n_rows and DIM, converted to the dtype of x."""
    ROWS: tl.constexpr = tile.shape[0]
    CHANNELS: tl.constexpr = tile.shape[1]
    address = tile_addresses(x, b, h, first, ROWS, CHANNELS)
    mask = tile_mask(first, n_rows, DIM, ROWS, CHANNELS)
    tl.store(address, tile.to(x.start.dtype.element_ty), mask)


@triton.jit
def plan_range(head, first):
    """Returns the key range [begin, end) of the plan for the queries from `first` on; without a
    plan, all keys."""
    begin, end = 0, head.problem.n_key
    if head.problem.plan is not None:
        keys = row_address(head.problem.plan.keys, head.b, head.h, first // PLAN_TILE)
        begin, end = tl.load(keys), tl.load(keys + 1)
    return begin, end


@triton.jit
def visible(problem, p, j, first_key, end_key):
    """Returns the mask of pairs: whether the query at position p exists and attends to key j, which
    must be in [first_key, end_key)."""
    sees = (j < end_key) & (p < problem.n_key + problem.shift)
    if problem.plan is not None:
        sees &= j >= first_key
    if problem.causal:
        sees &= j <= p
    if problem.windowed:
        sees &= p - j < problem.window
    return sees


@triton.jit
def along(x, COLUMNS: tl.constexpr):
    """Returns a vector [n] as a row [1, n] with COLUMNS, else as a column [n, 1]."""
    return x[None, :] if COLUMNS else x[:, None]


@triton.jit
def round_down(n, SIZE: tl.constexpr):
    """Returns the largest multiple of SIZE that is at most n, or 0 if n is negative."""
    return tl.maximum(n, 0) // SIZE * SIZE


@triton.jit
def round_up(n, SIZE: tl.constexpr):
    return round_down(n + SIZE - 1, SIZE)
