"""Selects the tiles of a cache that decoding computes. The others are proved to hold at most a
fraction `tolerance` of the softmax mass.

The bound is the one of csrc/cpu/tile_selection.h; see DESIGN.md, "Decoding".
"""

from __future__ import annotations

import triton
import triton.language as tl

from ... import shared_constants
from ..operands import Head
from ..primitives import INFINITY, LN2, LOG2E, dot, row_address
from .page_bias import (
    PageKeys,
    block_queries,
    highest_bias,
    page_logits,
)
from .pages import (
    add_logits,
    block_number,
    load_queries,
    load_rows,
    page_of,
    range_of_tiles,
    tile_rows,
)

NEAR_KEYS = tl.constexpr(shared_constants.NEAR_KEYS)
ROUNDING_FLOOR = tl.constexpr(shared_constants.ROUNDING_FLOOR)
# A tile is skipped only if its bound is at most this fraction of the tolerance, so that a single
# tile cannot use up the budget of many.
MAX_TILE_FRACTION = tl.constexpr(2**-4)


@triton.jit
def attn_choose_kernel(
    q,
    k,
    bounds,
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
    queries = block_queries(Head(bias, problem, b, h), i, p, exists)

    m = tl.full([BLOCK_M], -INFINITY, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    largest_square = 0.0
    for first in range(near * SIZE, tl.minimum(end * SIZE, length), BLOCK_N):
        j = first + tl.arange(0, BLOCK_N)
        page, row = page_of(problem, b, first)
        # [BLOCK_N, BLOCK_D]
        tile_k = load_rows(k, page, kv_head, row, j < length, problem.head_dim, BLOCK_N, BLOCK_D)
        keys = PageKeys(page, row, j)
        # In float64, as the bounds ignore the rounding errors of a bias.
        s = page_logits(Head(bias, problem, b, h), tile_q, tile_k, queries, keys, tl.float64)
        _, _, m, l = add_logits(s, m, l)
        squares = tile_k.to(tl.float32) * tile_k.to(tl.float32)
        largest_square = tl.maximum(largest_square, tl.max(tl.sum(squares, 1), 0))
    lse = (m + tl.log2(l)) * LN2
    squares = tile_q.to(tl.float32) * tile_q.to(tl.float32)
    query_norm = tl.abs(problem.scale_in_base_2) * LN2 * tl.sqrt(tl.sum(squares, 1))
    uncertain = ROUNDING_FLOOR + rounding * (1 + query_norm * tl.sqrt(largest_square) + tl.abs(lse))
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
            row_address(bounds.centres, page, kv_head, place)[:, None] + channel,
            channel < problem.head_dim,
            other=0.0,
        )
        extent = row_address(bounds.extents, page, kv_head, place)
        radius = tl.load(extent) + rounding * tl.load(extent + 1)
        # Before the product, which leaves few registers. [BLOCK_M, BLOCK_N]
        highest = highest_bias(Head(bias, problem, b, h), bounds, queries, key, page, place)
        logits = dot(tile_q, tl.trans(tile_centres)) * (problem.scale_in_base_2 * LN2)
        logits = (
            logits.to(tl.float64) + (query_norm[:, None] * radius[None, :]).to(tl.float64) + highest
        )
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
