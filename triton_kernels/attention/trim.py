"""Ranges of keys are shortened by what turns out to be worth little."""

from __future__ import annotations

import triton
import triton.language as tl

from ..bias.tile import gains
from ..primitives import LOG2E, group_and_block, load_tile, round_down, round_up, row_address
from .logits import key_side, query_side, tile_logits

CHUNK = tl.constexpr(8)  # tiles that are computed before it is asked whether to go on


@triton.jit
def attn_trim_kernel(
    q,
    k,
    near,
    cut,
    bias,
    problem,
    share,
    reach,
    FROM_END: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Where the keys that BLOCK_M queries need begin, or FROM_END where they end.

    From the far end of the queries' range, tile after tile goes while for every query the sum of
    exp(s_ij - near_i) over all that went is at most `share`, and none of its `reach` nearest past
    keys is among them. A sum of NaN is not.
    """
    group, block = group_and_block(problem, LAST_FIRST=True)
    b, h, first = group // problem.heads, group % problem.heads, block * BLOCK_M
    tile_q = load_tile(q, b, h, first, problem.n_query, problem.head_dim, BLOCK_M, BLOCK_D)
    gain = gains(bias, problem, b, h, first, BLOCK_M)
    queries = query_side(bias, problem, b, h, first, gain, BLOCK_M)
    i = first + tl.arange(0, BLOCK_M)
    exists = i < problem.n_query
    pivot = tl.load(row_address(near, b, h, 0) + i, exists, other=0.0) * LOG2E

    p_first, begin, end = queries[0], queries[3], queries[4]
    if FROM_END:
        p_last = tl.minimum(first + BLOCK_M, problem.n_query) - 1 + p_first - first
        edge = round_up(end, BLOCK_N)
        origin, tiles = edge - BLOCK_N, (edge - round_up(p_last + 1, BLOCK_N)) // BLOCK_N
    else:
        if problem.windowed:
            begin = tl.maximum(begin, p_first - problem.window + 1)
        edge = round_down(begin, BLOCK_N)
        origin, tiles = edge, (round_down(p_first - reach + 1, BLOCK_N) - edge) // BLOCK_N
    STEP: tl.constexpr = -BLOCK_N if FROM_END else BLOCK_N

    sums = tl.zeros([BLOCK_M], tl.float32)
    started = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    seen, gone = 0, 0
    # Loops of known length are those in which the next tiles arrive while one is computed.
    while (seen == gone) & (seen < tiles):
        for tile in range(seen, tl.minimum(seen + CHUNK, tiles)):
            j = origin + tile * STEP
            tile_k = load_tile(
                k, b, h // problem.group, j, problem.n_key, problem.head_dim, BLOCK_N, BLOCK_D
            )
            keys = key_side(bias, problem, b, h, j, BLOCK_N)
            x, multiplier, _ = tile_logits(
                *(bias, problem, b, h, tile_q, tile_k, queries, keys, started),
                MASKED=True,
                FACTORED=False,
                KEYS_FIRST=False,
            )
            sums += tl.sum(tl.exp2(x * multiplier - pivot[:, None]), 1)
            within = tl.min((~exists | (sums <= share)).to(tl.int32), 0)
            gone += within
        seen = tl.minimum(seen + CHUNK, tiles)
    edge += gone * STEP
    edge = tl.minimum(edge, end) if FROM_END else tl.maximum(edge, queries[3])
    tl.store(row_address(cut, b, h, block), edge)
