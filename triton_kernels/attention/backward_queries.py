"""Gradients of q, of slopes and gains, and of the prefix sums at the queries."""

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
from ..bias.relative import add_vector_gradients, padded_rank
from ..bias.segments import add_segment_gradients
from ..bias.tile import gains, pair_address, prefix_difference, table_values, tile_gradients
from ..operands import Rows
from ..primitives import (
    LOG2E,
    dot,
    group_and_block,
    load_tile,
    position,
    row_address,
    store_tile,
    visible,
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
from .backward import query_statistics, round_to_operand, weights_and_gradients
from .logits import key_side, pairs, query_side
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
    grad_gain_sums,
    sum_gradients,
    grad_gain,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    FACTORED: tl.constexpr,
    SIDE: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr,
):
    """Adds the key tiles in [begin, end) to dq / scale and to the gradients of the gain and of the
    prefix sums; see attn_bwd_dq_kernel."""
    BLOCK_M: tl.constexpr = tile_q.shape[0]
    BLOCK_D: tl.constexpr = tile_q.shape[1]
    BLOCK_DV: tl.constexpr = tile_do.shape[1]
    kv_head = h // problem.group
    lse, delta = statistics
    AHEAD: tl.constexpr = FACTORED and bias.ahead
    PRODUCTS: tl.constexpr = BIAS_GRADIENT and FACTORED
    if PRODUCTS and bias.gain is None:
        factors = shared_key_factors(BLOCK_N, SIDE, bias.sum_columns)
    initial = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if FACTORED:
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
        if FACTORED and not AHEAD:
            initial = key_product(bias, problem, b, h, q_factors, queries[0], j, BLOCK_N, SIDE)
        if FACTORED and bias.form != "distance":
            difference = (from_queries - from_keys).to(tl.float32)
            offset = intercept + slope * difference
        _, grad_s = weights_and_gradients(
            *(bias, problem, b, h, tile_q, tile_k, tile_v, tile_do, offset, delta),
            *(queries, keys, initial, MASKED, FACTORED),
            KEYS_FIRST=False,
        )
        dq = dot(grad_s.to(tile_k.dtype), tile_k, dq)
        if BIAS_GRADIENT and bias.form == "dense":
            p_of_pairs, j_of_pairs, _, _ = pairs(bias, queries, keys, False)
            i = p_of_pairs - position(problem, 0)
            exists = (i < problem.n_query) & (j_of_pairs < problem.n_key)
            tl.store(pair_address(grad_gain, b, h, i, j_of_pairs), grad_s, exists)
        elif BIAS_GRADIENT and bias.form == "normalized":
            p_of_pairs, j_of_pairs, _, _ = pairs(bias, queries, keys, False)
            sees = True
            if MASKED:
                sees = visible(problem, p_of_pairs, j_of_pairs, queries[3], queries[4])
            t = table_values(bias, problem, b, h, p_of_pairs, j_of_pairs, sees)
            grad_gain_sums, sum_gradients = add_segment_gradients(
                bias.function, b, h, t, queries[1], grad_s, grad_gain_sums, sum_gradients
            )
        elif BIAS_GRADIENT and bias.form == "relative":
            sum_gradients = add_vector_gradients(
                *(bias, problem, h, bias.tables.queries, queries[0], j, grad_s, sum_gradients),
                *(bias.tables.query_rank, False),
            )
        elif PRODUCTS:
            before = products
            if bias.gain is not None:
                factors = tile_key_factors(
                    bias, problem, b, h, queries[0], j, BLOCK_N, SIDE, COLUMNS=bias.sum_columns
                )
            products = times_factors(grad_s, factors, products, tile_k.dtype == tl.float16)
            carried += (products - before) * difference
        elif BIAS_GRADIENT:
            if bias.factored:
                grad_s = round_to_operand(grad_s, tile_k.dtype == tl.float16)
            pair_gradients = tile_gradients(
                bias, problem, grad_s, *pairs(bias, queries, keys, False)
            )
            grad_gain_sums += tl.sum(pair_gradients[0], 1)
            sum_gradients += tl.sum(pair_gradients[1], 1)
        if FACTORED:
            next_j = next_tile(j, end, BLOCK_N)
            from_keys = key_origin(bias, problem, b, h, next_j, BLOCK_N, SIDE)
        if AHEAD:
            initial = key_product(bias, problem, b, h, q_factors, queries[0], next_j, BLOCK_N, SIDE)
    if PRODUCTS:
        tile_sums = query_gradient_sums(products, carried, query_difference, SIDE)
        grad_gain_sums += tile_sums[0]
        sum_gradients += tile_sums[1]
    return dq, grad_gain_sums, sum_gradients


@triton.jit
def store_lines(grad_lines, b, h, block, values):
    """Stores the gradients of intercepts and slopes, [2, segments], of one block of queries."""
    SEGMENTS: tl.constexpr = values.shape[1]
    n = tl.arange(0, 2)[:, None] * SEGMENTS + tl.arange(0, SEGMENTS)[None, :]
    tl.store(row_address(grad_lines, b, h, block) + n, values)


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
    grad_sums,
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
    grad_gain_sums = tl.zeros([BLOCK_M], tl.float32)
    if bias.form == "normalized":
        sum_gradients = tl.zeros([2, bias.function.segments], tl.float32)
    elif BIAS_GRADIENT and bias.form == "relative":
        sum_gradients = tl.zeros([BLOCK_M, padded_rank(bias.tables.query_rank)], tl.float32)
    else:
        sum_gradients = tl.zeros([BLOCK_M], tl.float32)
    for PART in tl.static_range(KEY_PARTS):
        if key_part_exists(
            *(PART, problem.causal, problem.windowed or problem.plan is not None),
            *(bias.form, bias.factored),
        ):
            dq, grad_gain_sums, sum_gradients = accumulate_over_keys(
                *(k, v, bias, problem, b, h, first, tile_q, tile_do, statistics, queries),
                *(bounds[PART], bounds[PART + 1], dq, grad_gain_sums, sum_gradients, grad_gain),
                BLOCK_N=part_block(BLOCK_N, key_part_is_factored(PART), bias.factored),
                MASKED=key_part_is_masked(PART, bias.form, bias.factored),
                FACTORED=key_part_is_factored(PART),
                SIDE=key_part_side(PART),
                BIAS_GRADIENT=BIAS_GRADIENT,
            )

    store_tile(grad_q, b, h, first, problem.n_query, dq * problem.scale, problem.head_dim)
    if BIAS_GRADIENT:
        i = first + tl.arange(0, BLOCK_M)
        exists = i < problem.n_query
        if bias.form == "linear" or bias.gain is not None:
            tl.store(row_address(grad_gain, b, h, 0) + i, grad_gain_sums, exists)
        if bias.form == "normalized":
            store_lines(grad_sums, b, h, first // BLOCK_M, sum_gradients)
        elif bias.form == "relative":
            store_tile(
                *(grad_sums, b, h, first, problem.n_query, sum_gradients, bias.tables.query_rank)
            )
        else:
            tl.store(row_address(grad_sums, b, h, 0) + i, sum_gradients * queries[1], exists)


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
    grad_sums,
    bias,
    problem,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr,
):
    """dq_i = scale sum_j dS_ij k_j and, with BIAS_GRADIENT, grad_gain_i = sum_j dS_ij dbeta_ij/dg_i
    and grad_sums_i = sum_j dS_ij dbeta_ij/dC[p_i], (B, H, Nq) each, where the bias is a function of
    beta. For a dense bias, grad_gain is dS, (B, H, Nq, Nk); tiles without visible pairs are not
    written. For a normalized bias, grad_sums is (B, H, blocks, 2 * segments): the gradients of
    intercepts and slopes that each block of queries contributes. For a relative bias, grad_sums is
    (B, H, Nq, R): the gradient of the vectors of the queries.

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
        own_pairs(grad_gain, problem, b)
        if bias.form == "dense"
        else own_queries(grad_gain, problem, b),
        grad_sums if bias.form == "normalized" else own_queries(grad_sums, problem, b),
        OwnBias(bias, own_rows(bias, problem, b)),
        OwnProblem(problem, own_lengths(problem, b)),
        *(b, h, first, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, BIAS_GRADIENT),
    )
