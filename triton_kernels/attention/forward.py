"""The forward kernel: online softmax over the key tiles visible to a block of queries."""

from __future__ import annotations

import triton
import triton.language as tl

from ..bias.factors import (
    key_origin,
    key_product,
    next_tile,
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
    is_past_end,
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

# The exponent of the largest power of two in float16.
MAX_FLOAT16_EXPONENT = tl.constexpr(15)


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
    """Adds the key tiles in [begin, end) to acc, m and l; see attn_fwd_kernel."""
    BLOCK_M: tl.constexpr = tile_q.shape[0]
    BLOCK_D: tl.constexpr = tile_q.shape[1]
    BLOCK_DV: tl.constexpr = acc.shape[1]
    kv_head = h // problem.group
    HAS_FACTORS: tl.constexpr = FACTORED and bias.vector_tables is None
    AHEAD: tl.constexpr = HAS_FACTORS and bias.ahead
    initial = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if HAS_FACTORS:
        q_factors = tile_query_factors(bias, b, h, first, BLOCK_M, SIDE)
        from_queries = query_origin(bias, problem, b, h, queries[0], BLOCK_M, SIDE)
        slope = (SIDE * LOG2E) * queries[1]
        intercept = slope * prefix_difference(from_queries, queries[2])
        from_keys = key_origin(bias, problem, b, h, begin, BLOCK_N, SIDE)
    if AHEAD:
        initial = key_product(
            bias, problem, b, h, q_factors, queries[0], begin, BLOCK_N, SIDE, end - begin
        )
    for j in range(begin, end, BLOCK_N):
        # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
        tile_k = load_tile(
            *(k, b, kv_head, j, problem.n_key, problem.head_dim, BLOCK_N, BLOCK_D),
            *(MASKED, problem.narrow_offsets),
        )
        tile_v = load_tile(
            *(v, b, kv_head, j, problem.n_key, problem.value_dim, BLOCK_N, BLOCK_DV),
            *(MASKED, problem.narrow_offsets),
        )
        keys = key_side(bias, problem, b, h, j, BLOCK_N)
        offset = 0.0
        if HAS_FACTORS and not AHEAD:
            initial = key_product(bias, problem, b, h, q_factors, queries[0], j, BLOCK_N, SIDE)
        if HAS_FACTORS and bias.table is None:
            offset = intercept + slope * (from_queries - from_keys).to(tl.float32)
        x, multiplier, _ = tile_logits(
            *(bias, problem, b, h, tile_q, tile_k, queries, keys, initial, MASKED, FACTORED),
            KEYS_FIRST=False,
        )
        highest = tl.max(x, 1) * multiplier
        m_new = tl.maximum(m, highest + offset)
        pivot = m_new - offset
        if tile_v.dtype == tl.float16:
            # Beyond a step of -1e9, m is rounded to hundreds, and weights relative to it could be
            # infinite. Raising the pivot keeps them finite; later keys make them negligible.
            pivot += tl.maximum(highest - pivot - MAX_FLOAT16_EXPONENT, 0.0)
        p = tl.exp2(x * multiplier - pivot[:, None])
        rescale = tl.exp2(m - m_new)
        l = l * rescale + tl.sum(p, 1)
        acc = dot(p.to(tile_v.dtype), tile_v, acc * rescale[:, None])
        m = m_new
        if HAS_FACTORS:
            next_j = next_tile(j, end, BLOCK_N)
            from_keys = key_origin(bias, problem, b, h, next_j, BLOCK_N, SIDE)
        if AHEAD:
            initial = key_product(bias, problem, b, h, q_factors, queries[0], next_j, BLOCK_N, SIDE)
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
    """Computes attn_fwd_kernel for the queries first ... first + BLOCK_M - 1 of one sequence."""
    if problem.same_row_stride:
        v = Rows(v.start, v.batch, v.head, k.row)
    # [BLOCK_M, BLOCK_D]
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
            *(bias.factored, bias.only_far),
        ):
            acc, m, l = attend_keys(
                *(k, v, bias, problem, b, h, first, tile_q, queries),
                *(bounds[PART], bounds[PART + 1], acc, m, l),
                BLOCK_N=part_block(BLOCK_N, key_part_is_factored(PART), bias.factored),
                MASKED=key_part_is_masked(PART, bias.factored, bias.only_far),
                FACTORED=key_part_is_factored(PART),
                SIDE=key_part_side(PART),
            )

    has_keys = l != 0
    l = tl.where(has_keys, l, 1.0)
    store_tile(o, b, h, first, problem.n_query, acc / l[:, None], problem.value_dim)
    values = (m.to(tl.float64) + tl.log2(l)) * LN2
    i = first + tl.arange(0, BLOCK_M)
    values = tl.where(has_keys, values, -INFINITY).to(tl.float32)
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
    """o_i = sum_j exp(s_ij - lse_i) v_j and lse_i = log sum_j exp(s_ij), for BLOCK_M queries.

    Invariant: after each key tile, o_i = acc / l and lse_i = ln(2) (m + log2 l) over the keys so
    far. Rows without visible keys, or with only logits of -inf, have m = LOWEST and l = 0.
    """
    group, block = group_and_block(problem, LAST_FIRST=True)
    b, h, first = group // problem.heads, group % problem.heads, block * BLOCK_M
    if is_past_end(problem, b, first, N_QUERY):
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
