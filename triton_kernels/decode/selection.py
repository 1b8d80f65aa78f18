"""Selects the tiles of a cache that decoding computes. The others are proved to hold at most a
fraction `tolerance` of the softmax mass.

The bound is the one of csrc/cpu/tile_selection.h; see DESIGN.md, "Decoding".
"""

from __future__ import annotations

import triton
import triton.language as tl

from ... import shared_constants
from ..bias.segments import largest_value
from ..bias.tile import log2
from ..primitives import INFINITY, LN2, LOG2E, dot, row_address
from .pages import (
    add_logits,
    block_number,
    load_queries,
    load_rows,
    page_logits,
    page_of,
    query_at,
    query_bias,
    range_of_tiles,
    tile_rows,
)

NEAR_KEYS = tl.constexpr(shared_constants.NEAR_KEYS)
PEAK_DISTANCES = tl.constexpr(shared_constants.PEAK_DISTANCES)
ROUNDING_FLOOR = tl.constexpr(shared_constants.ROUNDING_FLOOR)
# A tile is skipped only if its bound is at most this fraction of the tolerance, so that a single
# tile cannot use up the budget of many.
MAX_TILE_FRACTION = tl.constexpr(2**-4)


@triton.jit
def highest_bias(bias, lows, highs, problem, b, h, p, gain, query_sums, first, page, tile):
    """Returns upper bounds on the bias of the tiles whose first keys are `first`, in natural
    logarithms. [BLOCK_M, BLOCK_N]

    h, p, gain and query_sums are [BLOCK_M, 1], the others [1, BLOCK_N]. The bound is float64,
    because large terms of opposite sign cancel. lows and highs are the minima and maxima of prefix
    sums or of the blocks of a table: see Bounds; for a relative bias, those of each query's terms.
    """
    nearest = tl.minimum(p - (first + problem.tile_keys - 1), problem.window - 1)
    farthest = tl.minimum(p - first, problem.window - 1)
    if bias.form == "distance":
        # The distances of a tile are in at most two blocks of the table.
        table = row_address(highs, b, h, 0)
        of_nearest = tl.load(table + nearest // PEAK_DISTANCES)
        of_farthest = tl.load(table + farthest // PEAK_DISTANCES)
        highest = tl.maximum(of_nearest, of_farthest).to(tl.float64)
    elif bias.form == "relative":
        table = row_address(highs, b, h, query_at(problem, b, p))
        beyond = (bias.tables.columns - 1) // PEAK_DISTANCES + 1
        of_nearest = tl.load(table + tl.minimum(nearest // PEAK_DISTANCES, beyond))
        of_farthest = tl.load(table + tl.minimum(farthest // PEAK_DISTANCES, beyond))
        highest = tl.maximum(of_nearest, of_farthest).to(tl.float64)
    elif bias.form == "normalized":
        near, far = nearest // PEAK_DISTANCES, farthest // PEAK_DISTANCES
        low, high = row_address(lows, b, h, 0), row_address(highs, b, h, 0)
        low = tl.minimum(tl.load(low + near), tl.load(low + far)).to(tl.float64)
        high = tl.maximum(tl.load(high + near), tl.load(high + far)).to(tl.float64)
        low, high = gain.to(tl.float64) * low, gain.to(tl.float64) * high
        low, high = tl.minimum(low, high), tl.maximum(low, high)
        highest = largest_value(bias.function, b, h, low, high)
    elif bias.form == "linear":
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
def attn_choose_kernel(
    q,
    k,
    centres,
    extents,
    lows,
    highs,
    bias,
    problem,
    log_fraction,
    rounding,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Writes the list of tiles that a block of queries attends to, and its length.

    The near tiles are always in the list. The others are examined from the oldest on, BLOCK_N at a
    time, and skipped while, for every row, the bounds of all skipped tiles sum to at most 1 in
    units of the tolerance. Bounds of NaN are never skipped.

    log_fraction: the logarithm of the tolerance divided by the number of keys per tile. rounding:
    the rounding error of a logit relative to the norms of its query and key.
    """
    b, kv_head = tl.program_id(0) // problem.kv_heads, tl.program_id(0) % problem.kv_heads
    g, i, exists = tile_rows(problem, tl.program_id(1), BLOCK_M)
    h = kv_head * problem.group + g
    length = tl.load(problem.lengths + b).to(tl.int32)
    p = length - problem.n_query + i
    SIZE: tl.constexpr = problem.tile_keys
    begin, end, first_position = range_of_tiles(problem, p, exists, length, SIZE)
    near = tl.minimum(tl.maximum((first_position - NEAR_KEYS + 1) // SIZE, begin), end)
    tile_q = load_queries(q, problem, b, h, i, exists, BLOCK_D)
    gain, query_sums = query_bias(bias, problem, b, h, i, p, exists)

    m = tl.full([BLOCK_M], -INFINITY, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    longest = 0.0
    for first in range(near * SIZE, tl.minimum(end * SIZE, length), BLOCK_N):
        j = first + tl.arange(0, BLOCK_N)
        page, row = page_of(problem, b, first)
        # [BLOCK_N, BLOCK_D]
        tile_k = load_rows(k, page, kv_head, row, j < length, problem.head_dim, BLOCK_N, BLOCK_D)
        s = page_logits(
            *(tile_q, tile_k, bias, problem, b, h, p, gain, query_sums, exists, page, row, j)
        )
        _, _, m, l = add_logits(s, m, l)
        squares = tile_k.to(tl.float32) * tile_k.to(tl.float32)
        longest = tl.maximum(longest, tl.max(tl.sum(squares, 1), 0))
    lse = (m + tl.log2(l)) * LN2
    squares = tile_q.to(tl.float32) * tile_q.to(tl.float32)
    reach = tl.abs(problem.scale_in_base_2) * LN2 * tl.sqrt(tl.sum(squares, 1))
    uncertain = ROUNDING_FLOOR + rounding * (1 + reach * tl.sqrt(longest) + tl.abs(lse))
    budget = (lse + log_fraction - uncertain).to(tl.float64)

    chosen = problem.lists + block_number() * problem.max_tiles
    count = 0
    spent = tl.zeros([BLOCK_M], tl.float32)
    channel = tl.arange(0, BLOCK_D)[None, :]
    for first in range(begin, near, BLOCK_N):
        tile = first + tl.arange(0, BLOCK_N)
        is_far = tile < near
        key = tl.where(is_far, tile, first) * SIZE
        page, row = page_of(problem, b, key)
        place = row // SIZE
        # [BLOCK_N, BLOCK_D]
        tile_centres = tl.load(
            row_address(centres, page, kv_head, place)[:, None] + channel,
            channel < problem.head_dim,
            other=0.0,
        )
        extent = row_address(extents, page, kv_head, place)
        radius = tl.load(extent) + rounding * tl.load(extent + 1)
        # Before the product, which leaves few registers. [BLOCK_M, BLOCK_N]
        highest = highest_bias(
            *(bias, lows, highs, problem, b, h[:, None], p[:, None], gain[:, None]),
            *(query_sums[:, None], key[None, :], page[None, :], place[None, :]),
        )
        logits = dot(tile_q, tl.trans(tile_centres)) * (problem.scale_in_base_2 * LN2)
        logits = logits.to(tl.float64) + (reach[:, None] * radius[None, :]).to(tl.float64) + highest
        bound = tl.exp2(((logits - budget[:, None]) * LOG2E).to(tl.float32))
        bound = tl.where(exists[:, None], bound, 0.0)
        small = tl.min((bound <= MAX_TILE_FRACTION).to(tl.int32), 0) == 1
        bound = tl.where((small & is_far)[None, :], bound, 0.0)
        total = spent[:, None] + tl.cumsum(bound, 1)
        skipped = small & (tl.min((total <= 1).to(tl.int32), 0) == 1)
        spent += tl.sum(tl.where(skipped[None, :], bound, 0.0), 1)
        kept = (is_far & ~skipped).to(tl.int32)
        tl.store(chosen + count + tl.cumsum(kept, 0) - 1, tile, kept == 1)
        count += tl.sum(kept, 0)
    for tile in range(near, end):
        tl.store(chosen + count + (tile - near), tile)
    tl.store(problem.counts + block_number(), count + (end - near))
