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
    key_factors,
    key_gradient_sums,
    linear_key_factors,
    query_gradient_sums,
    query_gradient_weights,
    signed_query_factors,
    tile_key_factors,
    tile_query_factors,
    times_factors,
)
from .logits import along, key_side, query_side, tile_logits
from .primitives import FACTORS, INFINITY, LOG2E, dot, load_tile, row_address, store_tile
from .ranges import (
    KEY_PARTS,
    QUERY_PARTS,
    key_part_exists,
    key_part_is_masked,
    key_part_side,
    key_ranges,
    query_part_exists,
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
def query_statistics(lse_in_base_2, delta, problem, b, h, first, BLOCK_M: tl.constexpr):
    """lse in base 2 and D, [BLOCK_M]; beyond the last query, those of one without weights."""
    i = first + tl.arange(0, BLOCK_M)
    exists = i < problem.n_query
    lse = tl.load(row_address(lse_in_base_2, b, h, 0) + i, exists, other=INFINITY)
    return lse, tl.load(row_address(delta, b, h, 0) + i, exists, other=0.0)


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
    statistics,
    queries,
    keys,
    q_factors,
    k_factors,
    EDGE: tl.constexpr,
    SIDE: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):
    """P and dS of a tile, [BLOCK_M, BLOCK_N] or with KEYS_FIRST transposed; 0 where masked."""
    lse, delta = statistics
    x, multiplier, offset, sees = tile_logits(
        *(bias, problem, b, h, tile_q, tile_k, queries, keys, q_factors, k_factors),
        EDGE=EDGE,
        SIDE=SIDE,
        KEYS_FIRST=KEYS_FIRST,
    )
    p = tl.exp2(x * multiplier - along(lse - offset, KEYS_FIRST))
    grad_p = dot(tile_v, tl.trans(tile_do)) if KEYS_FIRST else dot(tile_do, tl.trans(tile_v))
    grad_s = p * (grad_p - along(delta, KEYS_FIRST))
    if EDGE:
        p, grad_s = tl.where(sees, p, 0.0), tl.where(sees, grad_s, 0.0)
    return p, grad_s


@triton.jit
def bias_gradients(bias, problem, grad_s, queries, keys, KEYS_FIRST: tl.constexpr):
    """Terms of the gradients of the gain and, still to be multiplied by it, of C[p] and -C[j]."""
    p, gain, sums = queries
    j, origin, key_sums = keys
    from_tile = along((sums - origin).to(tl.float32), KEYS_FIRST)
    return tile_gradients(
        bias,
        problem,
        grad_s,
        along(p, KEYS_FIRST),
        along(j, not KEYS_FIRST),
        along(gain, KEYS_FIRST),
        from_tile,
        along(key_sums, not KEYS_FIRST),
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
    kv_head = h // problem.group
    # The last queries see most keys: longest first.
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    # [BLOCK_M, BLOCK_D], [BLOCK_M, BLOCK_DV]
    tile_q = load_tile(q, b, h, first, problem.n_query, problem.head_dim, BLOCK_M, BLOCK_D)
    tile_do = load_tile(grad_o, b, h, first, problem.n_query, problem.value_dim, BLOCK_M, BLOCK_DV)
    statistics = query_statistics(lse_in_base_2, delta, problem, b, h, first, BLOCK_M)
    gain = shared_gain(bias, b, h, BLOCK_M)
    queries = query_side(bias, problem, b, h, first, gain, BLOCK_M)
    bounds = key_ranges(problem, bias, first, BLOCK_M, BLOCK_N)

    of_linear = linear_key_factors(bias, BLOCK_N)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    of_gain = tl.zeros([BLOCK_M], tl.float32)
    of_sums = tl.zeros([BLOCK_M], tl.float32)
    of_factors = tl.zeros([BLOCK_M, FACTORS], tl.float32)
    for PART in tl.static_range(KEY_PARTS):
        if key_part_exists(PART, problem.causal, problem.windowed, bias.factored):
            q_factors = signed_query_factors(bias, problem, queries[1], key_part_side(PART))
            for j in range(bounds[PART], bounds[PART + 1], BLOCK_N):
                # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
                tile_k = load_tile(
                    *(k, b, kv_head, j, problem.n_key, problem.head_dim, BLOCK_N, BLOCK_D),
                    EDGE=key_part_is_masked(PART),
                )
                tile_v = load_tile(
                    *(v, b, kv_head, j, problem.n_key, problem.value_dim, BLOCK_N, BLOCK_DV),
                    EDGE=key_part_is_masked(PART),
                )
                keys = key_side(bias, problem, b, h, j, BLOCK_N)
                k_factors = tile_key_factors(
                    *(bias, b, h, j, of_linear, BLOCK_N), EDGE=key_part_is_masked(PART)
                )
                _, grad_s = weights_and_gradients(
                    *(bias, problem, b, h, tile_q, tile_k, tile_v, tile_do),
                    *(statistics, queries, keys, q_factors, k_factors),
                    EDGE=key_part_is_masked(PART),
                    SIDE=key_part_side(PART),
                    KEYS_FIRST=False,
                )
                dq = dot(grad_s.to(tile_k.dtype), tile_k, dq)
                if BIAS_GRADIENT and bias.factored and not key_part_is_masked(PART):
                    products = tl.zeros([BLOCK_M, FACTORS], tl.float32)
                    products = times_factors(
                        grad_s, k_factors, products, IN_TWO=tile_k.dtype == tl.float16
                    )
                    from_tile = (queries[2] - keys[1]).to(tl.float32)
                    of_factors += products * query_gradient_weights(
                        from_tile, SIDE=key_part_side(PART)
                    )
                elif BIAS_GRADIENT:
                    terms = bias_gradients(bias, problem, grad_s, queries, keys, False)
                    of_gain += tl.sum(terms[0], 1)
                    of_sums += tl.sum(terms[1], 1)

    store_tile(grad_q, b, h, first, problem.n_query, dq * problem.scale, problem.head_dim)
    if BIAS_GRADIENT:
        factored = query_gradient_sums(of_factors)
        of_gain, of_sums = of_gain + factored[0], of_sums + factored[1]
        i = first + tl.arange(0, BLOCK_M)
        exists = i < problem.n_query
        tl.store(row_address(grad_gain, b, h, 0) + i, of_gain, exists)
        tl.store(row_address(grad_sums, b, h, 0) + i, of_sums * queries[1], exists)


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
    bounds = query_ranges(problem, bias, first, BLOCK_M, BLOCK_N)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for h in range(kv_head * problem.group, (kv_head + 1) * problem.group):
        keys = key_side(bias, problem, b, h, first, BLOCK_N)
        k_factors = key_factors(keys[2][:, None])
        gain = shared_gain(bias, b, h, BLOCK_M)
        of_sums = tl.zeros([BLOCK_N], tl.float32)
        of_factors = tl.zeros([BLOCK_N, FACTORS], tl.float32)
        for PART in tl.static_range(QUERY_PARTS):
            if query_part_exists(PART, problem.causal, bias.factored):
                of_head = signed_query_factors(bias, problem, gain, query_part_side(PART))
                for i in range(bounds[PART], bounds[PART + 1], BLOCK_M):
                    # [BLOCK_M, BLOCK_D], [BLOCK_M, BLOCK_DV]
                    tile_q = load_tile(
                        *(q, b, h, i, problem.n_query, problem.head_dim, BLOCK_M, BLOCK_D),
                        EDGE=query_part_is_masked(PART),
                    )
                    tile_do = load_tile(
                        *(grad_o, b, h, i, problem.n_query, problem.value_dim, BLOCK_M, BLOCK_DV),
                        EDGE=query_part_is_masked(PART),
                    )
                    statistics = query_statistics(lse_in_base_2, delta, problem, b, h, i, BLOCK_M)
                    queries = query_side(bias, problem, b, h, i, gain, BLOCK_M)
                    q_factors = of_head
                    if not query_part_is_masked(PART):
                        q_factors = tile_query_factors(
                            *(bias, b, h, i, of_head, BLOCK_M), SIDE=query_part_side(PART)
                        )
                    p, grad_s = weights_and_gradients(
                        *(bias, problem, b, h, tile_q, tile_k, tile_v, tile_do),
                        *(statistics, queries, keys, q_factors, k_factors),
                        EDGE=query_part_is_masked(PART),
                        SIDE=query_part_side(PART),
                        KEYS_FIRST=True,
                    )
                    dv = dot(p.to(tile_do.dtype), tile_do, dv)
                    dk = dot(grad_s.to(tile_q.dtype), tile_q, dk)
                    if BIAS_GRADIENT and bias.factored and not query_part_is_masked(PART):
                        of_factors = times_factors(
                            grad_s, q_factors, of_factors, IN_TWO=tile_q.dtype == tl.float16
                        )
                    elif BIAS_GRADIENT:
                        terms = bias_gradients(bias, problem, grad_s, queries, keys, True)
                        of_sums -= tl.sum(terms[1] * queries[1][None, :], 1)
        if BIAS_GRADIENT:
            of_sums += key_gradient_sums(problem, of_factors)
            j = first + tl.arange(0, BLOCK_N)
            tl.store(row_address(grad_sums, b, h, 0) + j, of_sums, j < problem.n_key)

    store_tile(grad_k, b, kv_head, first, problem.n_key, dk * problem.scale, problem.head_dim)
    store_tile(grad_v, b, kv_head, first, problem.n_key, dv, problem.value_dim)
