"""Attention of a few queries to the pages of a cache: parts of the keys, then their merging."""

from __future__ import annotations

import triton
import triton.language as tl

from .bias import log2
from .primitives import INFINITY, LN2, LOG2E, dot, row_address


@triton.jit
def tile_rows(problem, block, BLOCK_M: tl.constexpr):
    """Heads of the group, queries and whether they exist, of the rows of a block: row r is query
    r % n_query of head r // n_query. [BLOCK_M]"""
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row < problem.group * problem.n_query
    row = tl.where(exists, row, 0)
    return row // problem.n_query, row % problem.n_query, exists


@triton.jit
def page_of(problem, b, key):
    """The page that holds a key, and its row there."""
    column = key // problem.page_size % problem.columns
    page = tl.load(problem.block_table + b * problem.columns + column)
    return page, key % problem.page_size


@triton.jit
def page_bias(bias, problem, b, h, p, gain, query_sums, page, row, j, sees):
    """In base 2, of rows with positions p [BLOCK_M, 1] and keys j [1, BLOCK_N]; any number where
    sees is False."""
    if bias.form == "none":
        values = 0.0
    elif bias.form == "distance":
        table = row_address(bias.terms, b, h, 0)[:, None]
        values = tl.load(table + (p - j), sees, 0.0) * LOG2E
    else:
        if bias.form == "linear":
            difference = (p - j).to(tl.float32)
        else:
            # In float64, as the sums are: near pairs are as exact at position one million.
            address = row_address(bias.terms, page, h, row)[:, None]
            sums = tl.load(address + tl.arange(0, j.shape[1])[None, :], sees, 0.0)
            difference = (query_sums[:, None] - sums).to(tl.float32)
        beta = gain[:, None] * difference
        values = -log2(1 + beta * beta) if bias.squared else beta * LOG2E
    return values


@triton.jit
def query_bias(bias, problem, b, h, i, p, exists):
    """What a bias has of queries: gains, which of a linear one are -slopes, and sums."""
    gain = tl.full(i.shape, 1.0, tl.float32)
    sums = tl.zeros(i.shape, tl.float64)
    if bias.form == "linear":
        gain = -tl.load(row_address(bias.terms, b, h, 0))
    if bias.gain is not None:
        gain = tl.load(row_address(bias.gain, b, h, 0) + i)
    if bias.form == "cumulative":
        page, row = page_of(problem, b, tl.maximum(p, 0))
        page = tl.maximum(page, 0)  # that of a position before the first key, which has no page
        sums = tl.load(row_address(bias.terms, page, h, row), exists & (p >= 0), 0.0)
    return gain, sums


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
    """acc_i = sum_j 2^(s_ij - m_i) v_j, l_i and m_i over one part of the keys of a sequence, logits
    s in base 2. The rows of a program are queries of all heads that share a key head.

    acc_out (parts, B, H, Nq, Dv), m_out and l_out (parts, B, H, Nq), float32; a part without keys
    has m = -inf and l = 0.
    """
    b, kv_head = tl.program_id(0) // problem.kv_heads, tl.program_id(0) % problem.kv_heads
    part = tl.program_id(2)
    g, i, exists = tile_rows(problem, tl.program_id(1), BLOCK_M)
    h = kv_head * problem.group + g
    length = tl.load(problem.lengths + b).to(tl.int32)
    p = length - problem.n_query + i
    first_position = tl.min(tl.where(exists, p, length))
    begin = tl.maximum(first_position - problem.window + 1, 0) // BLOCK_N
    end = tl.cdiv(tl.max(tl.where(exists, p, -1)) + 1, BLOCK_N)
    share = tl.cdiv(tl.maximum(end - begin, 0), tl.num_programs(2))

    # [BLOCK_M, BLOCK_D]
    channel = tl.arange(0, BLOCK_D)[None, :]
    tile_q = tl.load(
        row_address(q, b, h, i)[:, None] + channel,
        exists[:, None] & (channel < problem.head_dim),
        other=0.0,
    )
    gain, query_sums = query_bias(bias, problem, b, h, i, p, exists)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m = tl.full([BLOCK_M], -INFINITY, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    value_channel = tl.arange(0, BLOCK_DV)[None, :]
    for tile in range(begin + part * share, tl.minimum(begin + (part + 1) * share, end)):
        j = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        page, row = page_of(problem, b, tile * BLOCK_N)
        # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
        rows = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
        held = (j < length)[:, None]
        tile_k = tl.load(
            row_address(k, page, kv_head, row) + (rows * k.row + channel),
            held & (channel < problem.head_dim),
            other=0.0,
        )
        tile_v = tl.load(
            row_address(v, page, kv_head, row) + (rows * v.row + value_channel),
            held & (value_channel < problem.value_dim),
            other=0.0,
        )
        sees = exists[:, None] & (j[None, :] <= p[:, None])
        sees &= p[:, None] - j[None, :] < problem.window
        s = dot(tile_q, tl.trans(tile_k)) * problem.scale_in_base_2
        s += page_bias(
            *(bias, problem, b, h, p[:, None], gain, query_sums, page, row, j[None, :], sees)
        )
        s = tl.where(sees, s, -INFINITY)
        m_new = tl.maximum(m, tl.max(s, 1))
        pivot = tl.where(m_new == -INFINITY, 0.0, m_new)
        weights = tl.exp2(s - pivot[:, None])
        shrink = tl.exp2(m - pivot)
        l = l * shrink + tl.sum(weights, 1)
        acc = dot(weights.to(tile_v.dtype), tile_v, acc * shrink[:, None])
        m = m_new

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
    """o_i and lse_i of one query from its parts. PARTS is a power of two, and at least `parts`."""
    number, rows = tl.program_id(0), tl.num_programs(0)
    part = tl.arange(0, PARTS).to(tl.int64)
    exists = part < parts
    of_parts = tl.load(m + part * rows + number, exists, -INFINITY)
    highest = tl.max(of_parts, 0)
    weights = tl.exp2(of_parts - tl.where(highest == -INFINITY, 0.0, highest))
    total = tl.sum(weights * tl.load(l + part * rows + number, exists, 0.0), 0)
    # [PARTS, BLOCK_DV]
    channel = tl.arange(0, BLOCK_DV)
    row = acc + ((part * rows + number) * problem.value_dim)[:, None] + channel[None, :]
    held = exists[:, None] & (channel[None, :] < problem.value_dim)
    summed = tl.sum(weights[:, None] * tl.load(row, held, 0.0), 0)

    saw = total != 0
    total = tl.where(saw, total, 1.0)
    b, h = number // (problem.heads * problem.n_query), number // problem.n_query % problem.heads
    i = number % problem.n_query
    target = row_address(o, b, h, i) + channel
    tl.store(target, (summed / total).to(o.start.dtype.element_ty), channel < problem.value_dim)
    value = (highest.to(tl.float64) + tl.log2(total)) * LN2
    tl.store(row_address(lse, b, h, 0) + i, tl.where(saw, value, -INFINITY).to(tl.float32))
