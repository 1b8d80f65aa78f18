"""o and lse: online softmax over the key tiles that a block of queries sees."""

from __future__ import annotations

import triton
import triton.language as tl

from ..bias.factors import (
    following,
    key_origin,
    key_product,
    query_origin,
    tile_query_factors,
)
from ..bias.tile import gains, prefix_difference
from ..operands import Rows
from ..primitives import (
    INFINITY,
    LN2,
    LOG2E,
    LOWEST,
    dot,
    group_and_block,
    load_tile,
    row_address,
    store_tile,
)
from ..sequences import (
    N_QUERY,
    OwnBias,
    OwnProblem,
    is_beyond,
    own_keys,
    own_lengths,
    own_queries,
    own_rows,
)
from .logits import key_side, query_side, tile_logits
from .tile_ranges import (
    KEY_PARTS,
    key_part_exists,
    key_part_is_factored,
    key_part_is_masked,
    key_part_side,
    key_ranges,
    part_block,
)

# Its highest power of two.
MOST_IN_FLOAT16 = tl.constexpr(15)


@triton.jit
def attend_keys(
    k,
    v,
    bias,
    problem,
    b,
    h,
    first,
    tile_q,
    queries,
    begin,
    end,
    acc,
    m,
    l,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    FACTORED: tl.constexpr,
    SIDE: tl.constexpr,
):
    """acc, m and l with the key tiles from begin to end: see attn_fwd_kernel."""
    BLOCK_M: tl.constexpr = tile_q.shape[0]
    BLOCK_D: tl.constexpr = tile_q.shape[1]
    BLOCK_DV: tl.constexpr = acc.shape[1]
    kv_head = h // problem.group
    AHEAD: tl.constexpr = FACTORED and bias.ahead
    started = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if FACTORED:
        q_factors = tile_query_factors(bias, b, h, first, BLOCK_M, SIDE)
        from_queries = query_origin(bias, problem, b, h, queries[0], BLOCK_M, SIDE)
        slope = (SIDE * LOG2E) * queries[1]
        intercept = slope * prefix_difference(from_queries, queries[2])
        from_keys = key_origin(bias, problem, b, h, begin, BLOCK_N, SIDE)
    if AHEAD:
        started = key_product(
            bias, problem, b, h, q_factors, queries[0], begin, BLOCK_N, SIDE, end - begin
        )
    for j in range(begin, end, BLOCK_N):
        # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
        tile_k = load_tile(
            *(k, b, kv_head, j, problem.n_key, problem.head_dim, BLOCK_N, BLOCK_D),
            *(MASKED, problem.rows_near),
        )
        tile_v = load_tile(
            *(v, b, kv_head, j, problem.n_key, problem.value_dim, BLOCK_N, BLOCK_DV),
            *(MASKED, problem.rows_near),
        )
        keys = key_side(bias, problem, b, h, j, BLOCK_N)
        offset = 0.0
        if FACTORED and not AHEAD:
            started = key_product(bias, problem, b, h, q_factors, queries[0], j, BLOCK_N, SIDE)
        if FACTORED and bias.form != "distance":
            offset = intercept + slope * (from_queries - from_keys).to(tl.float32)
        x, multiplier, _ = tile_logits(
            *(bias, problem, b, h, tile_q, tile_k, queries, keys, started, MASKED, FACTORED),
            KEYS_FIRST=False,
        )
        highest = tl.max(x, 1) * multiplier
        m_new = tl.maximum(m, highest + offset)
        pivot = m_new - offset
        if tile_v.dtype == tl.float16:
            # Keys behind a step of -1e9 count for nothing once others are seen. Until then m, which
            # is rounded to hundreds there, leaves them weights that would be infinite.
            pivot += tl.maximum(highest - pivot - MOST_IN_FLOAT16, 0.0)
        p = tl.exp2(x * multiplier - pivot[:, None])
        shrink = tl.exp2(m - m_new)
        l = l * shrink + tl.sum(p, 1)
        acc = dot(p.to(tile_v.dtype), tile_v, acc * shrink[:, None])
        m = m_new
        if FACTORED:
            next_j = following(j, end, BLOCK_N)
            from_keys = key_origin(bias, problem, b, h, next_j, BLOCK_N, SIDE)
        if AHEAD:
            started = key_product(bias, problem, b, h, q_factors, queries[0], next_j, BLOCK_N, SIDE)
    return acc, m, l


@triton.jit
def attend(
    q,
    k,
    v,
    o,
    lse,
    bias,
    problem,
    b,
    h,
    first,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """What attn_fwd_kernel does, of the queries first, first + 1, ... of a sequence."""
    if problem.rows_alike:
        v = Rows(v.start, v.batch, v.head, k.row)
    tile_q = load_tile(q, b, h, first, problem.n_query, problem.head_dim, BLOCK_M, BLOCK_D)
    gain = gains(bias, problem, b, h, first, BLOCK_M)
    queries = query_side(bias, problem, b, h, first, gain, BLOCK_M)
    bounds = key_ranges(problem, bias, b, h, first, BLOCK_M, BLOCK_N)

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    for PART in tl.static_range(KEY_PARTS):
        if key_part_exists(
            *(PART, problem.causal, problem.windowed or problem.plan is not None),
            *(bias.form, bias.factored),
        ):
            acc, m, l = attend_keys(
                *(k, v, bias, problem, b, h, first, tile_q, queries),
                *(bounds[PART], bounds[PART + 1], acc, m, l),
                BLOCK_N=part_block(BLOCK_N, key_part_is_factored(PART), bias.factored),
                MASKED=key_part_is_masked(PART, bias.form, bias.factored),
                FACTORED=key_part_is_factored(PART),
                SIDE=key_part_side(PART),
            )

    saw = l != 0
    l = tl.where(saw, l, 1.0)
    store_tile(o, b, h, first, problem.n_query, acc / l[:, None], problem.value_dim)
    values = (m.to(tl.float64) + tl.log2(l)) * LN2
    i = first + tl.arange(0, BLOCK_M)
    values = tl.where(saw, values, -INFINITY).to(tl.float32)
    tl.store(row_address(lse, b, h, 0) + i, values, i < problem.n_query)


@triton.jit
def attn_fwd_kernel(
    q,
    k,
    v,
    o,
    lse,
    bias,
    problem,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """o_i = sum_j exp(s_ij - lse_i) v_j and lse_i = log sum_j exp(s_ij), of BLOCK_M queries.

    After each key tile, o_i is acc / l and lse_i is ln(2) (m + log2 l), of the keys so far. Rows
    that saw no key, or only logits of -inf, have m = LOWEST and l = 0.
    """
    group, block = group_and_block(problem, LAST_FIRST=True)
    b, h, first = group // problem.heads, group % problem.heads, block * BLOCK_M
    if is_beyond(problem, b, first, N_QUERY):
        return
    attend(
        own_queries(q, problem, b),
        own_keys(k, problem, b),
        own_keys(v, problem, b),
        own_queries(o, problem, b),
        own_queries(lse, problem, b),
        OwnBias(bias, own_rows(bias, problem, b)),
        OwnProblem(problem, own_lengths(problem, b)),
        *(b, h, first, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV),
    )
