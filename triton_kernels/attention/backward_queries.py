"""Gradients of q and of the operands of the bias that belong to queries."""

from __future__ import annotations

import triton
import triton.language as tl

from ..bias.factors import (
    key_origin,
    key_product,
    next_tile,
    query_gradient_sums,
    query_origin,
    shared_key_factors,
    tile_key_factors,
    tile_query_factors,
    times_factors,
)
from ..bias.gradients import add_query_gradients, query_gradients, store_query_gradients
from ..bias.tile import gains, prefix_difference
from ..operands import Rows
from ..primitives import (
    LOG2E,
    dot,
    group_and_block,
    load_tile,
    store_tile,
)
from ..sequences import (
    N_QUERY,
    OwnBias,
    OwnProblem,
    is_past_end,
    own_keys,
    own_lengths,
    own_pairs,
    own_queries,
    own_rows,
)
from .backward import query_statistics, weights_and_gradients
from .logits import key_side, query_side
from .tile_ranges import (
    KEY_PARTS,
    key_part_exists,
    key_part_is_factored,
    key_part_is_masked,
    key_part_side,
    key_ranges,
    part_block,
)


@triton.jit
def accumulate_over_keys(
    k,
    v,
    bias,
    problem,
    b,
    h,
    first,
    tile_q,
    tile_do,
    statistics,
    queries,
    begin,
    end,
    dq,
    gradients,
    grad_gain,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    FACTORED: tl.constexpr,
    SIDE: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr,
):
    """Adds the key tiles in [begin, end) to dq / scale and to the gradients of the bias; see
    attn_bwd_dq_kernel."""
    BLOCK_M: tl.constexpr = tile_q.shape[0]
    BLOCK_D: tl.constexpr = tile_q.shape[1]
    BLOCK_DV: tl.constexpr = tile_do.shape[1]
    kv_head = h // problem.group
    lse, delta = statistics
    HAS_FACTORS: tl.constexpr = FACTORED and bias.vector_tables is None
    AHEAD: tl.constexpr = HAS_FACTORS and bias.ahead
    PRODUCTS: tl.constexpr = BIAS_GRADIENT and HAS_FACTORS
    if PRODUCTS and bias.gain is None:
        factors = shared_key_factors(BLOCK_N, SIDE, bias.sum_columns)
    initial = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if HAS_FACTORS:
        q_factors = tile_query_factors(bias, b, h, first, BLOCK_M, SIDE)
        from_queries = query_origin(bias, problem, b, h, queries[0], BLOCK_M, SIDE)
        query_difference = prefix_difference(from_queries, queries[2])
        slope = (SIDE * LOG2E) * queries[1]
        intercept = slope * query_difference - lse
        from_keys = key_origin(bias, problem, b, h, begin, BLOCK_N, SIDE)
    if AHEAD:
        initial = key_product(
            bias, problem, b, h, q_factors, queries[0], begin, BLOCK_N, SIDE, end - begin
        )
    # dS times key factors, summed over tiles; and the same sum weighted by each tile's
    # `difference`.
    products = tl.zeros([BLOCK_M, bias.sum_columns], tl.float32)
    carried = tl.zeros([BLOCK_M, bias.sum_columns], tl.float32)
    difference = 0.0
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
        offset = -lse
        if HAS_FACTORS and not AHEAD:
            initial = key_product(bias, problem, b, h, q_factors, queries[0], j, BLOCK_N, SIDE)
        if HAS_FACTORS and bias.table is None:
            difference = (from_queries - from_keys).to(tl.float32)
            offset = intercept + slope * difference
        _, grad_s, sees = weights_and_gradients(
            *(bias, problem, b, h, tile_q, tile_k, tile_v, tile_do, offset, delta),
            *(queries, keys, initial, MASKED, FACTORED),
            KEYS_FIRST=False,
        )
        dq = dot(grad_s.to(tile_k.dtype), tile_k, dq)
        if PRODUCTS:
            before = products
            if bias.gain is not None:
                factors = tile_key_factors(
                    bias, problem, b, h, queries[0], j, BLOCK_N, SIDE, COLUMNS=bias.sum_columns
                )
            products = times_factors(grad_s, factors, products, tile_k.dtype == tl.float16)
            carried += (products - before) * difference
        elif BIAS_GRADIENT and not FACTORED:
            gradients = add_query_gradients(
                *(bias, problem, b, h, queries, keys, sees, grad_s, gradients, grad_gain),
                IN_TWO=tile_k.dtype == tl.float16,
            )
        if HAS_FACTORS:
            next_j = next_tile(j, end, BLOCK_N)
            from_keys = key_origin(bias, problem, b, h, next_j, BLOCK_N, SIDE)
        if AHEAD:
            initial = key_product(bias, problem, b, h, q_factors, queries[0], next_j, BLOCK_N, SIDE)
    if PRODUCTS:
        of_gain, of_sums = query_gradient_sums(products, carried, query_difference, SIDE)
        gradients = gradients[0] + of_gain, gradients[1] + of_sums
    return dq, gradients


@triton.jit
def backward_tile(
    q,
    k,
    v,
    grad_o,
    lse_in_base_2,
    delta,
    grad_q,
    grad_gain,
    grad_others,
    bias,
    problem,
    b,
    h,
    first,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr,
):
    """Computes attn_bwd_dq_kernel for the queries first ... first + BLOCK_M - 1 of one sequence."""
    if problem.same_row_stride:
        v = Rows(v.start, v.batch, v.head, k.row)
    # [BLOCK_M, BLOCK_D], [BLOCK_M, BLOCK_DV]
    tile_q = load_tile(q, b, h, first, problem.n_query, problem.head_dim, BLOCK_M, BLOCK_D)
    tile_do = load_tile(grad_o, b, h, first, problem.n_query, problem.value_dim, BLOCK_M, BLOCK_DV)
    statistics = query_statistics(lse_in_base_2, delta, problem, b, h, first, BLOCK_M)
    gain = gains(bias, problem, b, h, first, BLOCK_M)
    queries = query_side(bias, problem, b, h, first, gain, BLOCK_M)
    bounds = key_ranges(problem, bias, b, h, first, BLOCK_M, BLOCK_N)

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    gradients = query_gradients(bias, BLOCK_M)
    for PART in tl.static_range(KEY_PARTS):
        if key_part_exists(
            *(PART, problem.causal, problem.windowed or problem.plan is not None),
            *(bias.factored, bias.only_far),
        ):
            dq, gradients = accumulate_over_keys(
                *(k, v, bias, problem, b, h, first, tile_q, tile_do, statistics, queries),
                *(bounds[PART], bounds[PART + 1], dq, gradients, grad_gain),
                BLOCK_N=part_block(BLOCK_N, key_part_is_factored(PART), bias.factored),
                MASKED=key_part_is_masked(PART, bias.factored, bias.only_far),
                FACTORED=key_part_is_factored(PART),
                SIDE=key_part_side(PART),
                BIAS_GRADIENT=BIAS_GRADIENT,
            )

    store_tile(grad_q, b, h, first, problem.n_query, dq * problem.scale, problem.head_dim)
    if BIAS_GRADIENT:
        store_query_gradients(
            *(bias, problem, b, h, first, queries[1], gradients, grad_gain, grad_others)
        )


@triton.jit
def attn_bwd_dq_kernel(
    q,
    k,
    v,
    grad_o,
    lse_in_base_2,
    delta,
    grad_q,
    grad_gain,
    grad_others,
    bias,
    problem,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr,
):
    """dq_i = scale sum_j dS_ij k_j and, with BIAS_GRADIENT, the gradients of the queries' operands
    (bias/gradients.py). If the bias is a function of beta, these are grad_gain_i = sum_j dS_ij
    dbeta_ij/dg_i and grad_others_i = sum_j dS_ij dbeta_ij/dC[p_i], (B, H, Nq) each.

    Invariant: after each key tile, the accumulators hold these sums over the keys so far.
    """
    group, block = group_and_block(problem, LAST_FIRST=True)
    b, h, first = group // problem.heads, group % problem.heads, block * BLOCK_M
    if is_past_end(problem, b, first, N_QUERY):
        return
    backward_tile(
        own_queries(q, problem, b),
        own_keys(k, problem, b),
        own_keys(v, problem, b),
        own_queries(grad_o, problem, b),
        own_queries(lse_in_base_2, problem, b),
        own_queries(delta, problem, b),
        own_queries(grad_q, problem, b),
        own_queries(grad_gain, problem, b)
        if bias.of_pairs is None
        else own_pairs(grad_gain, problem, b),
        own_queries(grad_others, problem, b) if bias.function is None else grad_others,
        OwnBias(bias, own_rows(bias, problem, b)),
        OwnProblem(problem, own_lengths(problem, b)),
        *(b, h, first, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, BIAS_GRADIENT),
    )
