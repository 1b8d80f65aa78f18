"""Shortens the key ranges of a plan by keys of negligible softmax mass."""

from __future__ import annotations

import triton
import triton.language as tl

from ..bias.tile import gains, keys_from, queries_from
from ..operands import Head
from ..primitives import (
    LOG2E,
    group_and_block,
    load_keys,
    load_queries,
    round_down,
    round_up,
    row_address,
)
from .logits import tile_logits

CHUNK = tl.constexpr(8)  # tiles computed between checks whether to continue


@triton.jit
def attn_trim_kernel(
    q,
    k,
    near,
    cut,
    bias,
    problem,
    fraction,
    near_keys,
    FROM_END: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Computes the beginning of the keys that BLOCK_M queries need, or their end with FROM_END.

    From the far end of the key range, tiles are removed while, for every query, the sum of exp(s_ij
    - near_i) over all removed keys is at most `fraction` and none of its `near_keys` nearest past
    keys is removed. A sum of NaN ends the removal.
    """
    group, block = group_and_block(problem, LAST_FIRST=True)
    b, h, first = group // problem.heads, group % problem.heads, block * BLOCK_M
    # [BLOCK_M, BLOCK_D]
    tile_q = load_queries(q, Head(bias, problem, b, h), first, problem.head_dim, BLOCK_M, BLOCK_D)
    gain = gains(Head(bias, problem, b, h), first, BLOCK_M)
    queries = queries_from(Head(bias, problem, b, h), first, gain)
    i = first + tl.arange(0, BLOCK_M)
    exists = i < problem.n_query
    pivot = tl.load(row_address(near, b, h, 0) + i, exists, other=0.0) * LOG2E

    begin, end = queries.first_key, queries.end_key
    if FROM_END:
        p_last = tl.minimum(first + BLOCK_M, problem.n_query) - 1 + queries.first - first
        edge = round_up(end, BLOCK_N)
        origin, tiles = edge - BLOCK_N, (edge - round_up(p_last + 1, BLOCK_N)) // BLOCK_N
    else:
        if problem.windowed:
            begin = tl.maximum(begin, queries.first - problem.window + 1)
        edge = round_down(begin, BLOCK_N)
        origin, tiles = edge, (round_down(queries.first - near_keys + 1, BLOCK_N) - edge) // BLOCK_N
    STEP: tl.constexpr = -BLOCK_N if FROM_END else BLOCK_N

    sums = tl.zeros([BLOCK_M], tl.float32)
    initial = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    computed, removed = 0, 0
    # Only `for` loops are pipelined: they load the next tiles while one is computed.
    while (computed == removed) & (computed < tiles):
        for tile in range(computed, tl.minimum(computed + CHUNK, tiles)):
            j = origin + tile * STEP
            # [BLOCK_N, BLOCK_D]
            tile_k = load_keys(k, Head(bias, problem, b, h), j, problem.head_dim, BLOCK_N, BLOCK_D)
            logits = tile_logits(
                Head(bias, problem, b, h),
                tile_q,
                tile_k,
                queries,
                keys_from(Head(bias, problem, b, h), j, BLOCK_N),
                initial,
                MASKED=True,
                FACTORED=False,
                KEYS_FIRST=False,
            )
            sums += tl.sum(tl.exp2(logits.x * logits.multiplier - pivot[:, None]), 1)
            within = tl.min((~exists | (sums <= fraction)).to(tl.int32), 0)
            removed += within
        computed = tl.minimum(computed + CHUNK, tiles)
    edge += removed * STEP
    edge = tl.minimum(edge, end) if FROM_END else tl.maximum(edge, queries.first_key)
    tl.store(row_address(cut, b, h, block), edge)
