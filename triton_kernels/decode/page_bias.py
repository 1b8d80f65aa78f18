"""The bias of the keys of a page and its upper bound, computed from the operands of a form."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ... import shared_constants
from ..bias.relative import page_key_terms
from ..bias.segments import largest_value, values_of
from ..bias.tile import log2
from ..operands import Rows
from ..primitives import INFINITY, LN2, LOG2E, dot, row_address
from .pages import page_of, query_at

PEAK_DISTANCES = tl.constexpr(shared_constants.PEAK_DISTANCES)


class Queries(NamedTuple):
    """The queries of a block: positions, whether they exist, gains (-slopes for a linear bias) and
    prefix sums. [BLOCK_M] each, with the heads in Head.h."""

    p: tl.tensor
    exists: tl.tensor
    gain: tl.tensor
    sums: tl.tensor


class PageKeys(NamedTuple):
    """Keys j [BLOCK_N], which start at a row of a page."""

    page: tl.tensor
    row: tl.tensor
    j: tl.tensor


class TileBounds(NamedTuple):
    """The minima and maxima of prefix sums or of the blocks of a table, as in
    biased_flash_attn.problem.TileBounds; for a relative bias, those of each query's terms."""

    lows: Rows | None
    highs: Rows | None


class Tiles(NamedTuple):
    """Tiles of keys: their first keys, and their pages and places in them. [BLOCK_N] each."""

    first: tl.tensor
    page: tl.tensor
    place: tl.tensor


@triton.jit
def block_queries(head, i, p, exists):
    """Returns the Queries of a block: queries i at positions p."""
    gain = tl.full(i.shape, 1.0, tl.float32)
    sums = tl.zeros(i.shape, tl.float64)
    if head.bias.slopes is not None:
        gain = -tl.load(row_address(head.bias.slopes, head.b, head.h, 0))
    if head.bias.gain is not None:
        gain = tl.load(row_address(head.bias.gain, head.b, head.h, 0) + i)
    if head.bias.sums is not None:
        page, row = page_of(head.problem, head.b, tl.maximum(p, 0))
        page = tl.maximum(page, 0)  # a sequence without keys has no page
        sums = tl.load(row_address(head.bias.sums, page, head.h, row), exists & (p >= 0), 0.0)
    return Queries(p, exists, gain, sums)


@triton.jit
def page_bias(head, queries, keys, sees):
    """Returns the bias of a tile in base 2, [BLOCK_M, BLOCK_N]. Where sees is False, the value is
    arbitrary."""
    values = 0.0
    p, j, gain = queries.p[:, None], keys.j[None, :], queries.gain[:, None]
    if head.bias.vector_tables is not None:
        values = tl.zeros(sees.shape, tl.float32)
        if head.bias.table is not None:
            i = query_at(head.problem, head.b, p)
            table = row_address(head.bias.table, head.b, head.h[:, None], i)
            column = tl.minimum(p - j, head.bias.vector_tables.columns)
            values += tl.load(table + column, sees, 0.0)
        if head.bias.key_vectors is not None:
            values += page_key_terms(head, queries, keys, sees)
        values *= LOG2E
    elif head.bias.of_pairs is not None:
        i = query_at(head.problem, head.b, p)
        address = row_address(head.bias.of_pairs, head.b, head.h, 0)[:, None]
        address += tl.cast(i, tl.int64) * head.bias.of_pairs.row + j
        values = tl.load(address, sees, 0.0).to(tl.float32) * LOG2E
    elif head.bias.function is not None:
        # In float64, so that tiles may be skipped by bounds that ignore its rounding errors.
        table = row_address(head.bias.table, head.b, head.h, 0)[:, None]
        x = gain.to(tl.float64) * tl.load(table + (p - j), sees, 0.0)
        values = values_of(head.bias.function, head.b, head.h[:, None], x)
        values = (values * LOG2E).to(tl.float32)
    elif head.bias.table is not None:
        table = row_address(head.bias.table, head.b, head.h, 0)[:, None]
        values = tl.load(table + (p - j), sees, 0.0) * LOG2E
    elif head.bias.exists:
        if head.bias.sums is None:
            difference = (p - j).to(tl.float32)
        else:
            # Prefix sums are subtracted in float64, which is exact for near pairs at any position.
            address = row_address(head.bias.sums, keys.page, head.h, keys.row)[:, None]
            sums = tl.load(address + tl.arange(0, j.shape[1])[None, :], sees, 0.0)
            difference = (queries.sums[:, None] - sums).to(tl.float32)
        beta = gain * difference
        values = -log2(1 + beta * beta) if head.bias.squared else beta * LOG2E
    return values


@triton.jit
def highest_bias(head, bounds, queries, tiles):
    """Returns upper bounds on the bias of tiles, in natural logarithms. [BLOCK_M, BLOCK_N]

    The bound is float64, because large terms of opposite sign cancel.
    """
    h, p, gain = head.h[:, None], queries.p[:, None], queries.gain[:, None]
    first, last = tiles.first[None, :], tiles.first[None, :] + head.problem.tile_keys - 1
    nearest = tl.minimum(p - last, head.problem.window - 1)
    farthest = tl.minimum(p - first, head.problem.window - 1)
    # The distances of a tile are in at most two blocks of a table.
    near, far = nearest // PEAK_DISTANCES, farthest // PEAK_DISTANCES
    if head.bias.vector_tables is not None:
        table = row_address(bounds.highs, head.b, h, query_at(head.problem, head.b, p))
        beyond = (head.bias.vector_tables.columns - 1) // PEAK_DISTANCES + 1
        at_nearest = tl.load(table + tl.minimum(near, beyond))
        at_farthest = tl.load(table + tl.minimum(far, beyond))
        highest = tl.maximum(at_nearest, at_farthest).to(tl.float64)
    elif head.bias.function is not None:
        low = row_address(bounds.lows, head.b, h, 0)
        high = row_address(bounds.highs, head.b, h, 0)
        low = tl.minimum(tl.load(low + near), tl.load(low + far)).to(tl.float64)
        high = tl.maximum(tl.load(high + near), tl.load(high + far)).to(tl.float64)
        low, high = gain.to(tl.float64) * low, gain.to(tl.float64) * high
        low, high = tl.minimum(low, high), tl.maximum(low, high)
        highest = largest_value(head.bias.function, head.b, h, low, high)
    elif head.bias.table is not None:
        table = row_address(bounds.highs, head.b, h, 0)
        highest = tl.maximum(tl.load(table + near), tl.load(table + far)).to(tl.float64)
    elif head.bias.slopes is not None:
        slope = gain.to(tl.float64)  # the negative of the slope
        highest = slope * tl.where(slope < 0, nearest, farthest).to(tl.float64)
    else:
        page, place, sums = tiles.page[None, :], tiles.place[None, :], queries.sums[:, None]
        low = tl.load(row_address(bounds.lows, page, h, 0) + place)
        high = tl.load(row_address(bounds.highs, page, h, 0) + place)
        gain = gain.to(tl.float64)
        from_low, from_high = gain * (sums - low), gain * (sums - high)
        highest = tl.maximum(from_low, from_high)
        if head.bias.squared:
            least = tl.minimum(tl.abs(from_low), tl.abs(from_high))
            least = tl.where((from_low < 0) == (from_high < 0), least, 0.0)
            least = tl.minimum(least, 1e18).to(tl.float32)  # so that its square is finite
            highest = (-log2(1 + least * least) * LN2).to(tl.float64)
    return highest


@triton.jit
def page_logits(head, tile_q, tile_k, queries, keys):
    """Returns the logits in base 2, -inf where they are masked. [BLOCK_M, BLOCK_N]"""
    p, j = queries.p[:, None], keys.j[None, :]
    sees = queries.exists[:, None] & (j <= p) & (p - j < head.problem.window)
    s = dot(tile_q, tl.trans(tile_k)) * head.problem.scale_in_base_2
    s += page_bias(head, queries, keys, sees)
    return tl.where(sees, s, -INFINITY)
