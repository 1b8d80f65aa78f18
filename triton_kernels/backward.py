"""Gradients of q, k, v, and of what linear and cumulative biases hold.

    P_ij  = exp(s_ij - lse_i)
    D_i   = grad_o_i . o_i - grad_lse_i
    dS_ij = P_ij (grad_o_i . v_j - D_i), the gradient of the logits and so of the bias

One kernel gathers what belongs to queries, one what belongs to keys, each computing P and dS for
itself, so that nothing is added by more than one program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bias import shared_gain, tile_gradients
from .factors import (
    key_gradient_sums,
    key_origin,
    query_gradient_sums,
    query_origin,
    tile_key_factors,
    tile_query_factors,
    times_factors,
)
from .logits import along, key_side, pairs, query_side, tile_logits
from .primitives import FACTORS, INFINITY, LOG2E, dot, load_tile, row_address, store_tile
from .ranges import (
    PARTS,
    key_part_exists,
    key_part_is_factored,
    key_part_is_masked,
    key_part_side,
    key_ranges,
    query_part_exists,
    query_part_is_factored,
    query_part_is_masked,
    query_part_side,
    query_ranges,
)


@triton.jit
def attn_bwd_delta_kernel(
    o,
    grad_o,
    lse,
    grad_lse,
    lse_in_base_2,
    delta,
    problem,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """D, and lse in base 2. Queries without weights get lse = inf, which makes every P of theirs 0,
    and D = 0."""
    b, h = tl.program_id(0) // problem.heads, tl.program_id(0) % problem.heads
    first = tl.program_id(1) * BLOCK_M
    i = first + tl.arange(0, BLOCK_M)
    exists = i < problem.n_query
    # [BLOCK_M, BLOCK_DV]
    tile_o = load_tile(o, b, h, first, problem.n_query, problem.value_dim, BLOCK_M, BLOCK_DV)
    tile_do = load_tile(grad_o, b, h, first, problem.n_query, problem.value_dim, BLOCK_M, BLOCK_DV)
    values = tl.load(row_address(lse, b, h, 0) + i, exists, other=-INFINITY)
    cotangents = tl.load(row_address(grad_lse, b, h, 0) + i, exists, other=0.0)
    empty = values == -INFINITY
    d = tl.sum(tile_o.to(tl.float32) * tile_do.to(tl.float32), 1) - cotangents
    values = (values.to(tl.float64) * LOG2E).to(tl.float32)
    tl.store(row_address(delta, b, h, 0) + i, tl.where(empty, 0.0, d), exists)
    tl.store(row_address(lse_in_base_2, b, h, 0) + i, tl.where(empty, INFINITY, values), exists)


@triton.jit
def query_statistics(
    lse_in_base_2, delta, problem, b, h, first, BLOCK_M: tl.constexpr, EDGE: tl.constexpr = True
):
    """lse in base 2 and D, [BLOCK_M]; beyond the last query, those of one without weights."""
    n = tl.arange(0, BLOCK_M)
    lse, delta = row_address(lse_in_base_2, b, h, first), row_address(delta, b, h, first)
    if EDGE:
        exists = first + n < problem.n_query
        lse, delta = tl.load(lse + n, exists, INFINITY), tl.load(delta + n, exists, 0.0)
    else:
        lse, delta = tl.load(lse + n), tl.load(delta + n)
    return lse, delta


@triton.jit
def weights_and_gradients(
    bias,
    problem,
    b,
    h,
    tile_q,
    tile_k,
    tile_v,
    tile_do,
    offset,
    delta,
    queries,
    keys,
    factors,
    MASKED: tl.constexpr,
    FACTORED: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):
    """P and dS of a tile, [BLOCK_M, BLOCK_N] or with KEYS_FIRST transposed; 0 where masked.

    offset is what is left of a query's logits in base 2: one number a query, or one for all.
    """
    x, multiplier, sees = tile_logits(
        *(bias, problem, b, h, tile_q, tile_k, queries, keys, factors),
        *(MASKED, FACTORED, KEYS_FIRST),
    )
    p = tl.exp2(x * multiplier + along(offset, KEYS_FIRST))
    grad_p = dot(tile_v, tl.trans(tile_do)) if KEYS_FIRST else dot(tile_do, tl.trans(tile_v))
    grad_s = p * (grad_p - along(delta, KEYS_FIRST))
    if MASKED:
        p, grad_s = tl.where(sees, p, 0.0), tl.where(sees, grad_s, 0.0)
    return p, grad_s


@triton.jit
def gather_from_keys(
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
    of_gain,
    of_sums,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    FACTORED: tl.constexpr,
    SIDE: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr,
):
    """dq, still to be multiplied by scale, and the sums of the bias's gradient, with the key tiles
    from begin to end: see attn_bwd_dq_kernel."""
    BLOCK_M: tl.constexpr = tile_q.shape[0]
    BLOCK_D: tl.constexpr = tile_q.shape[1]
    BLOCK_DV: tl.constexpr = tile_do.shape[1]
    kv_head = h // problem.group
    lse, delta = statistics
    if FACTORED:
        q_factors = tile_query_factors(bias, b, h, first, BLOCK_M, SIDE)
        from_queries = query_origin(bias, problem, b, h, queries[0], BLOCK_M, SIDE)
        way_of_query = (queries[2] - from_queries).to(tl.float32)
        slope = (SIDE * LOG2E) * queries[1]
        intercept = slope * way_of_query - lse
        from_keys = key_origin(bias, problem, b, h, begin, BLOCK_N, SIDE)
    # dS times key factors, of all tiles; and of each tile, times the way of C since its origin.
    products = tl.zeros([BLOCK_M, FACTORS], tl.float32)
    carried = tl.zeros([BLOCK_M, FACTORS], tl.float32)
    way = 0.0
    for j in range(begin, end, BLOCK_N):
        # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
        tile_k = load_tile(
            *(k, b, kv_head, j, problem.n_key, problem.head_dim, BLOCK_N, BLOCK_D), EDGE=MASKED
        )
        tile_v = load_tile(
            *(v, b, kv_head, j, problem.n_key, problem.value_dim, BLOCK_N, BLOCK_DV), EDGE=MASKED
        )
        keys = key_side(bias, problem, b, h, j, BLOCK_N)
        factors, offset = (0, 0), -lse
        if FACTORED:
            k_factors = tile_key_factors(bias, problem, b, h, queries[0], j, BLOCK_N, SIDE)
            factors = q_factors, k_factors
            if bias.form != "distance":
                last_way = way
                way = (from_queries - from_keys).to(tl.float32)
                offset = intercept + slope * way
                # That of the next tile, before which there is time to wait for it.
                from_keys = key_origin(bias, problem, b, h, j + BLOCK_N, BLOCK_N, SIDE)
        _, grad_s = weights_and_gradients(
            *(bias, problem, b, h, tile_q, tile_k, tile_v, tile_do, offset, delta),
            *(queries, keys, factors, MASKED, FACTORED),
            KEYS_FIRST=False,
        )
        dq = dot(grad_s.to(tile_k.dtype), tile_k, dq)
        if BIAS_GRADIENT and FACTORED:
            carried += products * (last_way - way)
            products = times_factors(grad_s, factors[1], products, tile_k.dtype == tl.float16)
        elif BIAS_GRADIENT:
            of_pairs = tile_gradients(bias, problem, grad_s, *pairs(bias, queries, keys, False))
            of_gain += tl.sum(of_pairs[0], 1)
            of_sums += tl.sum(of_pairs[1], 1)
    if BIAS_GRADIENT and FACTORED:
        of_tiles = query_gradient_sums(products, carried, way_of_query + way, SIDE)
        of_gain += of_tiles[0]
        of_sums += of_tiles[1]
    return dq, of_gain, of_sums


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
    """dq_i = scale sum_j dS_ij k_j and, with BIAS_GRADIENT, the rows' share of the bias's gradient:
    grad_gain_i = sum_j dS_ij dbeta_ij/dg_i, and grad_sums_i = sum_j dS_ij dbeta_ij/dC[p_i], beta
    being what the bias is a function of. (B, H, Nq) each.
    """
    b, h = tl.program_id(0) // problem.heads, tl.program_id(0) % problem.heads
    # The last queries see most keys: longest first.
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    # [BLOCK_M, BLOCK_D], [BLOCK_M, BLOCK_DV]
    tile_q = load_tile(q, b, h, first, problem.n_query, problem.head_dim, BLOCK_M, BLOCK_D)
    tile_do = load_tile(grad_o, b, h, first, problem.n_query, problem.value_dim, BLOCK_M, BLOCK_DV)
    statistics = query_statistics(lse_in_base_2, delta, problem, b, h, first, BLOCK_M)
    gain = shared_gain(bias, b, h, BLOCK_M)
    queries = query_side(bias, problem, b, h, first, gain, BLOCK_M)
    bounds = key_ranges(problem, bias, b, h, first, BLOCK_M, BLOCK_N)

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    of_gain = tl.zeros([BLOCK_M], tl.float32)
    of_sums = tl.zeros([BLOCK_M], tl.float32)
    for PART in tl.static_range(PARTS):
        if key_part_exists(PART, problem.causal, problem.windowed, bias.form, bias.factored):
            dq, of_gain, of_sums = gather_from_keys(
                *(k, v, bias, problem, b, h, first, tile_q, tile_do, statistics, queries),
                *(bounds[PART], bounds[PART + 1], dq, of_gain, of_sums),
                BLOCK_N=BLOCK_N,
                MASKED=key_part_is_masked(PART, bias.form, bias.factored),
                FACTORED=key_part_is_factored(PART),
                SIDE=key_part_side(PART),
                BIAS_GRADIENT=BIAS_GRADIENT,
            )

    store_tile(grad_q, b, h, first, problem.n_query, dq * problem.scale, problem.head_dim)
    if BIAS_GRADIENT:
        i = first + tl.arange(0, BLOCK_M)
        exists = i < problem.n_query
        tl.store(row_address(grad_gain, b, h, 0) + i, of_gain, exists)
        tl.store(row_address(grad_sums, b, h, 0) + i, of_sums * queries[1], exists)


@triton.jit
def gather_from_queries(
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
    gain,
    keys,
    begin,
    end,
    dk,
    dv,
    of_sums,
    products,
    BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr,
    FACTORED: tl.constexpr,
    SIDE: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr,
):
    """dk, still to be multiplied by scale, dv and the sums of the bias's gradient, with the query
    tiles from begin to end: see attn_bwd_dkv_kernel."""
    BLOCK_N: tl.constexpr = tile_k.shape[0]
    BLOCK_D: tl.constexpr = tile_k.shape[1]
    BLOCK_DV: tl.constexpr = tile_v.shape[1]
    if FACTORED:
        from_keys = key_origin(bias, problem, b, h, keys[0], BLOCK_N, SIDE)
    for i in range(begin, end, BLOCK_M):
        # [BLOCK_M, BLOCK_D], [BLOCK_M, BLOCK_DV]
        tile_q = load_tile(
            *(q, b, h, i, problem.n_query, problem.head_dim, BLOCK_M, BLOCK_D), EDGE=MASKED
        )
        tile_do = load_tile(
            *(grad_o, b, h, i, problem.n_query, problem.value_dim, BLOCK_M, BLOCK_DV), EDGE=MASKED
        )
        lse, d = query_statistics(lse_in_base_2, delta, problem, b, h, i, BLOCK_M, MASKED)
        queries = query_side(bias, problem, b, h, i, gain, BLOCK_M, MASKED)
        factors, offset = (0, 0), -lse
        if FACTORED:
            factors = (
                tile_query_factors(bias, b, h, i, BLOCK_M, SIDE),
                tile_key_factors(bias, problem, b, h, queries[0], keys[0], BLOCK_N, SIDE),
            )
            if bias.form != "distance":
                from_queries = query_origin(bias, problem, b, h, queries[0], BLOCK_M, SIDE)
                offset = (SIDE * LOG2E) * queries[1] * (from_queries - from_keys).to(tl.float32)
        p, grad_s = weights_and_gradients(
            *(bias, problem, b, h, tile_q, tile_k, tile_v, tile_do, offset, d),
            *(queries, keys, factors, MASKED, FACTORED),
            KEYS_FIRST=True,
        )
        dv = dot(p.to(tile_do.dtype), tile_do, dv)
        dk = dot(grad_s.to(tile_q.dtype), tile_q, dk)
        if BIAS_GRADIENT and FACTORED:
            products = times_factors(grad_s, factors[0], products, tile_q.dtype == tl.float16)
        elif BIAS_GRADIENT:
            of_pairs = tile_gradients(bias, problem, grad_s, *pairs(bias, queries, keys, True))
            of_sums -= tl.sum(of_pairs[1] * queries[1][None, :], 1)
    return dk, dv, of_sums, products


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
    grad_sums,
    bias,
    problem,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr,
):
    """dv_j = sum_i P_ij grad_o_i and dk_j = scale sum_i dS_ij q_i, over all query heads that share
    the key head; with BIAS_GRADIENT, for each of them, grad_sums_j = sum_i dS_ij dbeta_ij/dC[j].
    """
    kv_heads = problem.heads // problem.group
    b, kv_head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    first = tl.program_id(1) * BLOCK_N
    # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
    tile_k = load_tile(k, b, kv_head, first, problem.n_key, problem.head_dim, BLOCK_N, BLOCK_D)
    tile_v = load_tile(v, b, kv_head, first, problem.n_key, problem.value_dim, BLOCK_N, BLOCK_DV)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for h in range(kv_head * problem.group, (kv_head + 1) * problem.group):
        keys = key_side(bias, problem, b, h, first, BLOCK_N)
        gain = shared_gain(bias, b, h, BLOCK_M)
        bounds = query_ranges(problem, bias, b, h, first, BLOCK_M, BLOCK_N)
        of_sums = tl.zeros([BLOCK_N], tl.float32)
        products = tl.zeros([BLOCK_N, FACTORS], tl.float32)
        for PART in tl.static_range(PARTS):
            if query_part_exists(PART, problem.causal, bias.form, bias.factored):
                dk, dv, of_sums, products = gather_from_queries(
                    *(q, grad_o, lse_in_base_2, delta, bias, problem, b, h, tile_k, tile_v, gain),
                    *(keys, bounds[PART], bounds[PART + 1], dk, dv, of_sums, products),
                    BLOCK_M=BLOCK_M,
                    MASKED=query_part_is_masked(PART),
                    FACTORED=query_part_is_factored(PART),
                    SIDE=query_part_side(PART),
                    BIAS_GRADIENT=BIAS_GRADIENT,
                )
        if BIAS_GRADIENT:
            of_sums += key_gradient_sums(problem, products)
            j = first + tl.arange(0, BLOCK_N)
            tl.store(row_address(grad_sums, b, h, 0) + j, of_sums, j < problem.n_key)

    store_tile(grad_k, b, kv_head, first, problem.n_key, dk * problem.scale, problem.head_dim)
    store_tile(grad_v, b, kv_head, first, problem.n_key, dv, problem.value_dim)
