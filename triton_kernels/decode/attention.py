"""Attention of a few queries to a paged cache: a split-K kernel, and the merge of its parts."""

from __future__ import annotations

import triton
import triton.language as tl

from ..operands import Head
from ..primitives import INFINITY, LN2, dot, row_address
from .page_bias import PageKeys, block_queries, page_logits
from .pages import (
    add_logits,
    block_number,
    load_queries,
    load_rows,
    page_of,
    range_of_tiles,
    tile_rows,
)


@triton.jit
def attn_decode_kernel(
    q,
    k,
    v,
    acc_out,
    m_out,
    l_out,
    bias,
    problem,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """acc_i = sum_j 2^(s_ij - m_i) v_j, l_i = sum_j 2^(s_ij - m_i) and m_i = max_j s_ij over one
    part of the keys of a sequence, with logits s in base 2. The rows of a program are queries of
    all heads that share a key head.

    acc_out (parts, B, H, Nq, Dv), m_out and l_out (parts, B, H, Nq), float32. A part without
    visible keys has m = -inf and l = 0.
    """
    b, kv_head = tl.program_id(0) // problem.kv_heads, tl.program_id(0) % problem.kv_heads
    part = tl.program_id(2)
    g, i, exists = tile_rows(problem, tl.program_id(1), BLOCK_M)
    h = kv_head * problem.group + g
    length = tl.load(problem.lengths + b).to(tl.int32)
    p = length - problem.n_query + i
    begin, end, _ = range_of_tiles(problem, p, exists, length, BLOCK_N)
    count, list_of_block = end - begin, problem.lists
    PER_TILE: tl.constexpr = problem.tile_keys // BLOCK_N
    if problem.lists is not None:
        list_of_block += block_number() * problem.max_tiles
        count = PER_TILE * tl.load(problem.counts + block_number())
    tiles_per_part = tl.cdiv(count, tl.num_programs(2))

    tile_q = load_queries(q, problem, b, h, i, exists, BLOCK_D)
    queries = block_queries(Head(bias, problem, b, h), i, p, exists)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m = tl.full([BLOCK_M], -INFINITY, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    for x in range(part * tiles_per_part, tl.minimum((part + 1) * tiles_per_part, count)):
        tile = begin + x
        if problem.lists is not None:
            x = tl.cast(x, tl.int32)
            tile = tl.load(list_of_block + x // PER_TILE) * PER_TILE + x % PER_TILE
        j = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        page, row = page_of(problem, b, tile * BLOCK_N)
        held = j < length
        # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
        tile_k = load_rows(k, page, kv_head, row, held, problem.head_dim, BLOCK_N, BLOCK_D)
        tile_v = load_rows(v, page, kv_head, row, held, problem.value_dim, BLOCK_N, BLOCK_DV)
        keys = PageKeys(page, row, j)
        s = page_logits(Head(bias, problem, b, h), tile_q, tile_k, queries, keys, tl.float32)
        weights, rescale, m, l = add_logits(s, m, l)
        acc = dot(weights.to(tile_v.dtype), tile_v, acc * rescale[:, None])

    value_channel = tl.arange(0, BLOCK_DV)[None, :]
    number = ((part * problem.batch + b) * problem.heads + h).to(tl.int64) * problem.n_query + i
    tl.store(m_out + number, m, exists)
    tl.store(l_out + number, l, exists)
    tl.store(
        acc_out + (number[:, None] * problem.value_dim + value_channel),
        acc,
        exists[:, None] & (value_channel < problem.value_dim),
    )


@triton.jit
def attn_decode_merge_kernel(
    acc, m, l, o, lse, problem, parts, PARTS: tl.constexpr, BLOCK_DV: tl.constexpr
):
    """o_i = sum_p 2^(m_p - m) acc_p / l and lse_i = ln(2) (m + log2 l) of one query i, where
    m = max_p m_p and l = sum_p 2^(m_p - m) l_p over its parts p.

    PARTS is a power of two, and at least `parts`.
    """
    number, rows = tl.program_id(0), tl.num_programs(0)
    part = tl.arange(0, PARTS).to(tl.int64)
    exists = part < parts
    # [PARTS]
    part_m = tl.load(m + part * rows + number, exists, -INFINITY)
    highest = tl.max(part_m, 0)
    weights = tl.exp2(part_m - tl.where(highest == -INFINITY, 0.0, highest))
    total = tl.sum(weights * tl.load(l + part * rows + number, exists, 0.0), 0)
    # [PARTS, BLOCK_DV]
    channel = tl.arange(0, BLOCK_DV)
    row = acc + ((part * rows + number) * problem.value_dim)[:, None] + channel[None, :]
    held = exists[:, None] & (channel[None, :] < problem.value_dim)
    summed = tl.sum(weights[:, None] * tl.load(row, held, 0.0), 0)

    has_keys = total != 0
    total = tl.where(has_keys, total, 1.0)
    b, h = number // (problem.heads * problem.n_query), number // problem.n_query % problem.heads
    i = number % problem.n_query
    target = row_address(o, b, h, i) + channel
    tl.store(target, (summed / total).to(o.start.dtype.element_ty), channel < problem.value_dim)
    value = (highest.to(tl.float64) + tl.log2(total)) * LN2
    tl.store(row_address(lse, b, h, 0) + i, tl.where(has_keys, value, -INFINITY).to(tl.float32))
