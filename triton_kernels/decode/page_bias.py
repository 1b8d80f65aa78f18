"""The bias of the keys of a page and its upper bound, computed from the operands of a form."""

from __future__ import annotations

import triton
import triton.language as tl

from ... import shared_constants
from ..bias.relative import key_terms
from ..bias.segments import largest_value, values_of
from ..bias.tile import log2
from ..primitives import INFINITY, LN2, LOG2E, dot, row_address
from .pages import page_of, query_at

PEAK_DISTANCES = tl.constexpr(shared_constants.PEAK_DISTANCES)


@triton.jit
def query_bias(bias, problem, b, h, i, p, exists):
    """Returns the gains (-slopes for a linear bias) and prefix sums of the queries. [BLOCK_M]
    each."""
    gain = tl.full(i.shape, 1.0, tl.float32)
    sums = tl.zeros(i.shape, tl.float64)
    if bias.slopes is not None:
        gain = -tl.load(row_address(bias.slopes, b, h, 0))
    if bias.gain is not None:
        gain = tl.load(row_address(bias.gain, b, h, 0) + i)
    if bias.sums is not None:
        page, row = page_of(problem, b, tl.maximum(p, 0))
        page = tl.maximum(page, 0)  # a sequence without keys has no page
        sums = tl.load(row_address(bias.sums, page, h, row), exists & (p >= 0), 0.0)
    return gain, sums


@triton.jit
def page_bias(bias, problem, b, h, p, gain, query_sums, page, row, j, sees):
    """Returns the bias in base 2 of queries at positions p [BLOCK_M, 1] and keys j [1, BLOCK_N].
    Where sees is False, the value is arbitrary."""
    values = 0.0
    if bias.vector_tables is not None:
        values = tl.zeros(sees.shape, tl.float32)
        if bias.table is not None:
            table = row_address(bias.table, b, h[:, None], query_at(problem, b, p))
            values += tl.load(table + tl.minimum(p - j, bias.vector_tables.columns), sees, 0.0)
        if bias.key_vectors is not None:
            values += key_terms(bias, h[:, None], p, page, row, j, sees)
        values *= LOG2E
    elif bias.of_pairs is not None:
        i = query_at(problem, b, p)
        address = row_address(bias.of_pairs, b, h, 0)[:, None]
        address += tl.cast(i, tl.int64) * bias.of_pairs.row + j
        values = tl.load(address, sees, 0.0).to(tl.float32) * LOG2E
    elif bias.function is not None:
        # In float64, so that tiles may be skipped by bounds that ignore its rounding errors.
        table = row_address(bias.table, b, h, 0)[:, None]
        x = gain[:, None].to(tl.float64) * tl.load(table + (p - j), sees, 0.0)
        values = (values_of(bias.function, b, h[:, None], x) * LOG2E).to(tl.float32)
    elif bias.table is not None:
        table = row_address(bias.table, b, h, 0)[:, None]
        values = tl.load(table + (p - j), sees, 0.0) * LOG2E
    elif bias.exists:
        if bias.sums is None:
            difference = (p - j).to(tl.float32)
        else:
            # Prefix sums are subtracted in float64, which is exact for near pairs at any position.
            address = row_address(bias.sums, page, h, row)[:, None]
            sums = tl.load(address + tl.arange(0, j.shape[1])[None, :], sees, 0.0)
            difference = (query_sums[:, None] - sums).to(tl.float32)
        beta = gain[:, None] * difference
        values = -log2(1 + beta * beta) if bias.squared else beta * LOG2E
    return values


@triton.jit
def highest_bias(bias, lows, highs, problem, b, h, p, gain, query_sums, first, page, tile):
    """Returns upper bounds on the bias of the tiles whose first keys are `first`, in natural
    logarithms. [BLOCK_M, BLOCK_N]

    h, p, gain and query_sums are [BLOCK_M, 1], the others [1, BLOCK_N]. The bound is float64,
    because large terms of opposite sign cancel. lows and highs are the minima and maxima of prefix
    sums or of the blocks of a table, as in TileBounds; for a relative bias, those of each query's
    terms.
    """
    nearest = tl.minimum(p - (first + problem.tile_keys - 1), problem.window - 1)
    farthest = tl.minimum(p - first, problem.window - 1)
    # The distances of a tile are in at most two blocks of a table.
    if bias.vector_tables is not None:
        table = row_address(highs, b, h, query_at(problem, b, p))
        beyond = (bias.vector_tables.columns - 1) // PEAK_DISTANCES + 1
        of_nearest = tl.load(table + tl.minimum(nearest // PEAK_DISTANCES, beyond))
        of_farthest = tl.load(table + tl.minimum(farthest // PEAK_DISTANCES, beyond))
        highest = tl.maximum(of_nearest, of_farthest).to(tl.float64)
    elif bias.function is not None:
        near, far = nearest // PEAK_DISTANCES, farthest // PEAK_DISTANCES
        low, high = row_address(lows, b, h, 0), row_address(highs, b, h, 0)
        low = tl.minimum(tl.load(low + near), tl.load(low + far)).to(tl.float64)
        high = tl.maximum(tl.load(high + near), tl.load(high + far)).to(tl.float64)
        low, high = gain.to(tl.float64) * low, gain.to(tl.float64) * high
        low, high = tl.minimum(low, high), tl.maximum(low, high)
        highest = largest_value(bias.function, b, h, low, high)
    elif bias.table is not None:
        table = row_address(highs, b, h, 0)
        of_nearest = tl.load(table + nearest // PEAK_DISTANCES)
        of_farthest = tl.load(table + farthest // PEAK_DISTANCES)
        highest = tl.maximum(of_nearest, of_farthest).to(tl.float64)
    elif bias.slopes is not None:
        slope = gain.to(tl.float64)  # the negative of the slope
        highest = slope * tl.where(slope < 0, nearest, farthest).to(tl.float64)
    else:
        low = tl.load(row_address(lows, page, h, 0) + tile)
        high = tl.load(row_address(highs, page, h, 0) + tile)
        gain = gain.to(tl.float64)
        from_low, from_high = gain * (query_sums - low), gain * (query_sums - high)
        highest = tl.maximum(from_low, from_high)
        if bias.squared:
            least = tl.minimum(tl.abs(from_low), tl.abs(from_high))
            least = tl.where((from_low < 0) == (from_high < 0), least, 0.0)
            least = tl.minimum(least, 1e18).to(tl.float32)  # so that its square is finite
            highest = (-log2(1 + least * least) * LN2).to(tl.float64)
    return highest


@triton.jit
def page_logits(tile_q, tile_k, bias, problem, b, h, p, gain, query_sums, exists, page, row, j):
    """Returns the logits in base 2 of the keys j [BLOCK_N], which start at a row of a page; -inf
    where they are masked. [BLOCK_M, BLOCK_N]"""
    p, j = p[:, None], j[None, :]
    sees = exists[:, None] & (j <= p) & (p - j < problem.window)
    s = dot(tile_q, tl.trans(tile_k)) * problem.scale_in_base_2
    s += page_bias(bias, problem, b, h, p, gain, query_sums, page, row, j, sees)
    return tl.where(sees, s, -INFINITY)
