"""Gradients of k, of v, and of the operand of the bias that belongs to keys."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..bias.factors import gain_factors, key_gradient_sums, times_factors
from ..bias.gradients import key_product_factors, no_key_gradients
from ..bias.products import (
    first_tile_factors,
    next_tile_factors,
    query_offset,
    with_query_product,
)
from ..bias.tile import Keys, keys_from, queries_from, shared_gain
from ..operands import Head, Strided
from ..primitives import (
    FACTORS,
    dot,
    group_and_block,
    load_tile,
    store_tile,
)
from ..sequences import (
    N_KEY,
    SequenceBias,
    SequenceProblem,
    is_past_end,
    per_token_operands,
    sequence_keys,
    sequence_lengths,
)
from .backward import (
    Inputs,
    Tiles,
    delta_and_gain,
    query_statistics,
    sequence_inputs,
    weights_and_gradients,
)
from .tile_ranges import next_queries, over_queries


class KeyBlock(NamedTuple):
    """A block of keys, and the operands of the queries that attend to it.

    trained: whether gradients of the bias are computed.
    """

    inputs: Inputs
    grad_o: Strided
    k: tl.tensor
    v: tl.tensor
    keys: Keys
    trained: tl.constexpr


class KeySums(NamedTuple):
    """dk / scale, dv, and the gradients of the bias."""

    dk: tl.tensor
    dv: tl.tensor
    bias: tl.tensor


@triton.constexpr_function
def has_registers(has_gain, width, ahead):
    """Whether the gradients of prefix sums may be products of dS and factors. With gains these need
    more registers, which wide heads have only if factors are prefetched."""
    return not has_gain or width <= 128 or ahead


@triton.jit
def accumulate_over_queries(head, block, sums, part):
    """Adds the query tiles of a part to the sums of attn_bwd_dkv_kernel."""
    BLOCK_N: tl.constexpr = block.k.shape[0]
    BLOCK_D: tl.constexpr = block.k.shape[1]
    BLOCK_DV: tl.constexpr = block.v.shape[1]
    IN_TWO: tl.constexpr = block.k.dtype == tl.float16
    HAS_GAIN: tl.constexpr = head.bias.gain is not None
    # Gradients of prefix sums are products of dS and factors where the distances of all pairs have
    # the same sign.
    PRODUCTS: tl.constexpr = (
        block.trained
        and head.bias.query_factors is not None
        and (part.factored or head.problem.causal)
        and has_registers(HAS_GAIN, BLOCK_D + BLOCK_DV, head.bias.ahead)
    )
    # The factors of the logits are used again, unless the next tile's have replaced them.
    REUSED: tl.constexpr = HAS_GAIN and part.has_factors and not head.bias.ahead
    COLUMNS: tl.constexpr = FACTORS if REUSED and PRODUCTS else head.bias.sum_columns
    shared = shared_gain(head, part.block)
    shared_factors = gain_factors(head.problem, shared, part.side, head.bias.sum_columns)
    products = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
    factors = first_tile_factors(head, block.keys, part)
    dk, dv, gradients = sums.dk, sums.dv, sums.bias
    for i in range(part.begin, part.end, part.block):
        # [block, BLOCK_D], [block, BLOCK_DV]
        tile_q = next_queries(block.inputs.q, head, i, part, head.problem.head_dim, BLOCK_D)
        tile_do = next_queries(block.grad_o, head, i, part, head.problem.value_dim, BLOCK_DV)
        lse, delta = query_statistics(block.inputs, head, i, part.block, part.masked)
        gain = shared
        if HAS_GAIN:
            delta, gain = delta_and_gain(block.inputs.delta, head, i, part.block, part.masked)
        queries = queries_from(head, i, gain)
        factors = with_query_product(head, block.keys, factors, i, part)
        if PRODUCTS:
            product_factors = key_product_factors(
                head, queries, factors, shared_factors, i, part, REUSED
            )
        pairs = weights_and_gradients(
            head,
            Tiles(tile_q, block.k, block.v, tile_do),
            queries,
            block.keys,
            query_offset(head, queries, factors, lse, part),
            delta,
            factors.product,
            MASKED=part.masked,
            FACTORED=part.factored,
            KEYS_FIRST=True,
        )
        dv = dot(pairs.p.to(tile_do.dtype), tile_do, dv)
        dk = dot(pairs.grad_s.to(tile_q.dtype), tile_q, dk)
        if PRODUCTS:
            products = times_factors(pairs.grad_s, product_factors, products, IN_TWO)
        elif block.trained and (part.has_factors or not part.factored):
            gradients = head.bias.form.add_key_gradients(
                head, queries, block.keys, pairs.grad_s, gradients, IN_TWO
            )
        factors = next_tile_factors(head, block.keys, factors, i, part)
    if PRODUCTS:
        gradients += key_gradient_sums(head.problem, products)
    return KeySums(dk, dv, gradients)


@triton.jit
def add_head(
    inputs,
    grad_o,
    grad_bias,
    head,
    first,
    tile_k,
    tile_v,
    dk,
    dv,
    BLOCK_M: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr,
):
    """Adds one query head to dk / scale and dv of keys first, first + 1, ..., and stores the
    gradients of its bias."""
    BLOCK_N: tl.constexpr = tile_k.shape[0]
    keys = keys_from(head, first, BLOCK_N)
    sums = over_queries(
        accumulate_over_queries,
        head,
        KeyBlock(inputs, grad_o, tile_k, tile_v, keys, BIAS_GRADIENT),
        KeySums(dk, dv, no_key_gradients(head, BLOCK_N)),
        first,
        BLOCK_M,
        BLOCK_N,
    )
    if BIAS_GRADIENT:
        head.bias.form.store_key_gradients(head, first, sums.bias, grad_bias)
    return sums.dk, sums.dv


@triton.jit
def backward_block(
    inputs,
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
    grad_o = inputs.grad_o
    if problem.same_row_stride:
        grad_o = Strided(grad_o.start, grad_o.batch, grad_o.head, inputs.q.row)
    # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
    tile_k = load_tile(
        inputs.k, b, kv_head, first, problem.n_key, problem.head_dim, BLOCK_N, BLOCK_D
    )
    tile_v = load_tile(
        inputs.v, b, kv_head, first, problem.n_key, problem.value_dim, BLOCK_N, BLOCK_DV
    )
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for h in range(kv_head * problem.group, (kv_head + 1) * problem.group):
        dk, dv = add_head(
            inputs,
            grad_o,
            grad_bias,
            Head(bias, problem, b, h),
            first,
            tile_k,
            tile_v,
            dk,
            dv,
            BLOCK_M,
            BIAS_GRADIENT,
        )
    dk *= problem.scale
    store_tile(grad_k, b, kv_head, first, problem.n_key, dk, problem.head_dim)
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
    head (forms/): grad_bias_j = sum_i dS_ij dbeta_ij/dC[j] if the bias is a function of
    beta.

    Invariant: after each query tile, the accumulators hold these sums over the queries so far.
    """
    kv_heads = problem.heads // problem.group
    group, block = group_and_block(problem, LAST_FIRST=False)
    b, kv_head, first = group // kv_heads, group % kv_heads, block * BLOCK_N
    if is_past_end(problem, b, first, N_KEY):
        return
    inputs = sequence_inputs(q, k, v, grad_o, lse_in_base_2, delta, problem, b)
    backward_block(
        inputs,
        sequence_keys(grad_k, problem, b),
        sequence_keys(grad_v, problem, b),
        sequence_keys(grad_bias, problem, b),
        SequenceBias(bias, per_token_operands(bias, problem, b)),
        SequenceProblem(problem, sequence_lengths(problem, b)),
        b,
        kv_head,
        first,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
        BLOCK_DV,
        BIAS_GRADIENT,
    )
