"""Gradients of k, of v, and of the operand of the bias that belongs to keys."""

from __future__ import annotations

import triton
import triton.language as tl

from ..bias.factors import (
    gain_factors,
    key_gradient_sums,
    key_origin,
    next_tile,
    query_origin,
    query_product,
    tile_key_factors,
    tile_query_factors,
    times_factors,
)
from ..bias.gradients import add_key_gradients, key_gradients, store_key_gradients
from ..bias.tile import shared_gain
from ..operands import Rows
from ..primitives import (
    FACTORS,
    LOG2E,
    dot,
    group_and_block,
    load_tile,
    position,
    store_tile,
)
from ..sequences import (
    N_KEY,
    OwnBias,
    OwnProblem,
    is_past_end,
    own_keys,
    own_lengths,
    own_queries,
    own_rows,
)
from .backward import delta_and_gain, query_statistics, weights_and_gradients
from .logits import key_side, query_side
from .tile_ranges import (
    QUERY_PARTS,
    part_block,
    query_part_exists,
    query_part_is_factored,
    query_part_is_masked,
    query_part_side,
    query_ranges,
)


@triton.jit
def accumulate_over_queries(
    q,
    grad_o,
    lse_in_base_2,
    delta,
    bias,
    problem,
    b,
    h,
    tile_k,
    tile_v,
    keys,
    begin,
    end,
    dk,
    dv,
    gradient,
    BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr,
    FACTORED: tl.constexpr,
    SIDE: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr,
):
    """Adds the query tiles in [begin, end) to dk / scale, dv and the gradient of the bias; see
    attn_bwd_dkv_kernel."""
    BLOCK_N: tl.constexpr = tile_k.shape[0]
    BLOCK_D: tl.constexpr = tile_k.shape[1]
    BLOCK_DV: tl.constexpr = tile_v.shape[1]
    # Where the distances of all pairs have the same sign, gradients of prefix sums are products of
    # dS and factors. With gains these need more registers, which wide heads have only if factors
    # are prefetched.
    FITS_IN_REGISTERS: tl.constexpr = bias.gain is None or BLOCK_D + BLOCK_DV <= 128 or bias.ahead
    PRODUCTS: tl.constexpr = (
        BIAS_GRADIENT
        and bias.factored
        and bias.vector_tables is None
        and FITS_IN_REGISTERS
        and (FACTORED or problem.causal)
    )
    HAS_FACTORS: tl.constexpr = FACTORED and bias.vector_tables is None
    AHEAD: tl.constexpr = HAS_FACTORS and bias.ahead
    # The factors of the logits are used again for the gradient, unless the next tile's replaced
    # them.
    REUSES_FACTORS: tl.constexpr = PRODUCTS and bias.gain is not None and FACTORED and not AHEAD
    shared = shared_gain(bias, b, h, BLOCK_M)
    if PRODUCTS and bias.gain is None:
        factors = gain_factors(problem, shared, SIDE, bias.sum_columns)
    products = tl.zeros([BLOCK_N, FACTORS if REUSES_FACTORS else bias.sum_columns], tl.float32)
    initial = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if HAS_FACTORS:
        from_keys = key_origin(bias, problem, b, h, keys[0], BLOCK_N, SIDE)
        p_first, remaining = position(problem, begin), end - begin
        from_queries = query_origin(bias, problem, b, h, p_first, BLOCK_M, SIDE)
        q_factors = tile_query_factors(bias, b, h, begin, BLOCK_M, SIDE, remaining)
        k_factors = tile_key_factors(
            bias, problem, b, h, p_first, keys[0], BLOCK_N, SIDE, remaining
        )
    if AHEAD:
        initial = dot(k_factors, tl.trans(q_factors))
    for i in range(begin, end, BLOCK_M):
        # [BLOCK_M, BLOCK_D], [BLOCK_M, BLOCK_DV]
        tile_q = load_tile(
            *(q, b, h, i, problem.n_query, problem.head_dim, BLOCK_M, BLOCK_D),
            *(MASKED, problem.narrow_offsets),
        )
        tile_do = load_tile(
            *(grad_o, b, h, i, problem.n_query, problem.value_dim, BLOCK_M, BLOCK_DV),
            *(MASKED, problem.narrow_offsets),
        )
        lse, d = query_statistics(lse_in_base_2, delta, problem, b, h, i, BLOCK_M, MASKED)
        gain = shared
        if bias.gain is not None:
            d, gain = delta_and_gain(delta, problem, b, h, i, BLOCK_M, MASKED)
        queries = query_side(bias, problem, b, h, i, gain, BLOCK_M)
        offset = -lse
        if HAS_FACTORS and bias.table is None:
            difference = (from_queries - from_keys).to(tl.float32)
            offset = queries[1] * ((SIDE * LOG2E) * difference)
        if HAS_FACTORS and not AHEAD:
            q_factors, k_factors, initial = query_product(
                bias, problem, b, h, i, p_first, keys[0], q_factors, k_factors, BLOCK_M, SIDE
            )
        if REUSES_FACTORS:
            factors = q_factors
        elif PRODUCTS and bias.gain is not None:
            if FACTORED:
                factors = tile_query_factors(bias, b, h, i, BLOCK_M, SIDE, COLUMNS=bias.sum_columns)
            else:
                factors = gain_factors(problem, gain, SIDE, bias.sum_columns)
        p, grad_s, _ = weights_and_gradients(
            *(bias, problem, b, h, tile_q, tile_k, tile_v, tile_do, offset, d),
            *(queries, keys, initial, MASKED, FACTORED),
            KEYS_FIRST=True,
        )
        dv = dot(p.to(tile_do.dtype), tile_do, dv)
        dk = dot(grad_s.to(tile_q.dtype), tile_q, dk)
        if PRODUCTS:
            products = times_factors(grad_s, factors, products, tile_q.dtype == tl.float16)
        elif BIAS_GRADIENT and (HAS_FACTORS or not FACTORED):
            gradient = add_key_gradients(
                *(bias, problem, h, queries, keys, grad_s, gradient),
                IN_TWO=tile_q.dtype == tl.float16,
            )
        if HAS_FACTORS:
            next_i = next_tile(i, end, BLOCK_M) if AHEAD else i + BLOCK_M
            p_first = position(problem, next_i)
            # Queries after a key have a position of 0 or more.
            EXISTS: tl.constexpr = AHEAD and SIDE > 0
            from_queries = query_origin(bias, problem, b, h, p_first, BLOCK_M, SIDE, EXISTS)
        if AHEAD:
            q_factors, k_factors, initial = query_product(
                bias, problem, b, h, next_i, p_first, keys[0], q_factors, k_factors, BLOCK_M, SIDE
            )
    if PRODUCTS:
        gradient += key_gradient_sums(problem, products)
    return dk, dv, gradient


@triton.jit
def backward_tile(
    q,
    k,
    v,
    grad_o,
    lse_in_base_2,
    delta,
    grad_k,
    grad_v,
    grad_bias,
    bias,
    problem,
    b,
    kv_head,
    first,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr,
):
    """Computes attn_bwd_dkv_kernel for the keys first ... first + BLOCK_N - 1 of one sequence."""
    if problem.same_row_stride:
        grad_o = Rows(grad_o.start, grad_o.batch, grad_o.head, q.row)
    # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
    tile_k = load_tile(k, b, kv_head, first, problem.n_key, problem.head_dim, BLOCK_N, BLOCK_D)
    tile_v = load_tile(v, b, kv_head, first, problem.n_key, problem.value_dim, BLOCK_N, BLOCK_DV)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for h in range(kv_head * problem.group, (kv_head + 1) * problem.group):
        keys = key_side(bias, problem, b, h, first, BLOCK_N)
        bounds = query_ranges(problem, bias, b, h, first, BLOCK_M, BLOCK_N)
        gradient = key_gradients(bias, BLOCK_N)
        for PART in tl.static_range(QUERY_PARTS):
            if query_part_exists(
                *(PART, problem.causal, problem.plan is not None),
                *(bias.factored, bias.only_far),
            ):
                dk, dv, gradient = accumulate_over_queries(
                    *(q, grad_o, lse_in_base_2, delta, bias, problem, b, h, tile_k, tile_v),
                    *(keys, bounds[PART], bounds[PART + 1], dk, dv, gradient),
                    BLOCK_M=part_block(BLOCK_M, query_part_is_factored(PART), bias.factored),
                    MASKED=query_part_is_masked(PART),
                    FACTORED=query_part_is_factored(PART),
                    SIDE=query_part_side(PART),
                    BIAS_GRADIENT=BIAS_GRADIENT,
                )
        if BIAS_GRADIENT:
            store_key_gradients(bias, problem, b, h, first, gradient, grad_bias)

    store_tile(grad_k, b, kv_head, first, problem.n_key, dk * problem.scale, problem.head_dim)
    store_tile(grad_v, b, kv_head, first, problem.n_key, dv, problem.value_dim)


@triton.jit
def attn_bwd_dkv_kernel(
    q,
    k,
    v,
    grad_o,
    lse_in_base_2,
    delta,
    grad_k,
    grad_v,
    grad_bias,
    bias,
    problem,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr,
):
    """dv_j = sum_i P_ij grad_o_i and dk_j = scale sum_i dS_ij q_i, summed over all query heads that
    share the key head; with BIAS_GRADIENT, also the gradient of the keys' operand for each query
    head (bias/gradients.py): grad_bias_j = sum_i dS_ij dbeta_ij/dC[j] if the bias is a function of
    beta.

    Invariant: after each query tile, the accumulators hold these sums over the queries so far.
    """
    kv_heads = problem.heads // problem.group
    group, block = group_and_block(problem, LAST_FIRST=False)
    b, kv_head, first = group // kv_heads, group % kv_heads, block * BLOCK_N
    if is_past_end(problem, b, first, N_KEY):
        return
    backward_tile(
        own_queries(q, problem, b),
        own_keys(k, problem, b),
        own_keys(v, problem, b),
        own_queries(grad_o, problem, b),
        own_queries(lse_in_base_2, problem, b),
        own_queries(delta, problem, b),
        own_keys(grad_k, problem, b),
        own_keys(grad_v, problem, b),
        own_keys(grad_bias, problem, b),
        OwnBias(bias, own_rows(bias, problem, b)),
        OwnProblem(problem, own_lengths(problem, b)),
        *(b, kv_head, first, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, BIAS_GRADIENT),
    )
