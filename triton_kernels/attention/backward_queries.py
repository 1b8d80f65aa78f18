"""Gradients of q and of the operands of the bias that belong to queries."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..bias.factors import shared_key_factors
from ..bias.gradients import (
    QueryGradients,
    add_query_products,
    no_query_gradients,
    no_query_products,
    with_query_products,
)
from ..bias.products import (
    first_key_terms,
    key_offset,
    next_key_terms,
    query_terms,
    with_key_product,
)
from ..bias.tile import Queries, gains, keys_from, queries_from
from ..operands import Head, Strided
from ..primitives import dot, group_and_block, load_queries, store_tile
from ..sequences import (
    N_QUERY,
    SequenceBias,
    SequenceProblem,
    is_past_end,
    per_token_operands,
    sequence_lengths,
    sequence_pairs,
    sequence_queries,
)
from .backward import Statistics, Tiles, query_statistics, sequence_inputs, weights_and_gradients
from .tile_ranges import next_keys, over_keys


class QueryBlock(NamedTuple):
    """A block of queries from `first` on, and the operands that it attends to.

    grad_pairs: where dS is stored, if it is the gradient of the bias. trained: whether gradients of
    the bias are computed.
    """

    k: Strided
    v: Strided
    grad_pairs: Strided
    first: tl.tensor
    q: tl.tensor
    grad_o: tl.tensor
    statistics: Statistics
    queries: Queries
    trained: tl.constexpr


class QuerySums(NamedTuple):
    """dq / scale, and the gradients of the bias."""

    dq: tl.tensor
    bias: QueryGradients


@triton.jit
def accumulate_over_keys(head, block, sums, part):
    """Adds the key tiles of a part to the sums of attn_bwd_dq_kernel."""
    BLOCK_M: tl.constexpr = block.q.shape[0]
    BLOCK_D: tl.constexpr = block.q.shape[1]
    BLOCK_DV: tl.constexpr = block.grad_o.shape[1]
    IN_TWO: tl.constexpr = block.q.dtype == tl.float16
    queries = block.queries
    terms = query_terms(head, queries, block.first, block.statistics.lse, part)
    key_terms = first_key_terms(head, queries, terms, part)
    shared = shared_key_factors(part.block, part.side, head.bias.sum_columns)
    products = no_query_products(head.bias, BLOCK_M)
    dq, gradients = sums.dq, sums.bias
    for j in range(part.begin, part.end, part.block):
        # [block, BLOCK_D], [block, BLOCK_DV]
        tile_k = next_keys(block.k, head, j, part, head.problem.head_dim, BLOCK_D)
        tile_v = next_keys(block.v, head, j, part, head.problem.value_dim, BLOCK_DV)
        keys = keys_from(head, j, part.block)
        key_terms = with_key_product(head, queries, terms, key_terms, j, part)
        pairs = weights_and_gradients(
            head,
            Tiles(block.q, tile_k, tile_v, block.grad_o),
            queries,
            keys,
            key_offset(head, terms, key_terms, part),
            block.statistics.delta,
            key_terms.product,
            MASKED=part.masked,
            FACTORED=part.factored,
            KEYS_FIRST=False,
        )
        dq = dot(pairs.grad_s.to(tile_k.dtype), tile_k, dq)
        if block.trained and part.has_factors:
            products = add_query_products(
                head, queries, terms, key_terms, shared, j, part, pairs.grad_s, products, IN_TWO
            )
        elif block.trained and not part.factored:
            gradients = head.bias.form.add_query_gradients(
                head, queries, keys, pairs, gradients, block.grad_pairs, IN_TWO
            )
        key_terms = next_key_terms(head, queries, terms, key_terms, j, part)
    if block.trained and part.has_factors:
        gradients = with_query_products(gradients, products, terms.difference, part.side)
    return QuerySums(dq, gradients)


@triton.jit
def backward_block(
    inputs,
    grad_q,
    grad_gain,
    grad_others,
    head,
    first,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr,
):
    """Computes attn_bwd_dq_kernel for the queries first ... first + BLOCK_M - 1 of one sequence."""
    v = inputs.v
    if head.problem.same_row_stride:
        v = Strided(v.start, v.batch, v.head, inputs.k.row)
    # [BLOCK_M, BLOCK_D], [BLOCK_M, BLOCK_DV]
    tile_q = load_queries(inputs.q, head, first, head.problem.head_dim, BLOCK_M, BLOCK_D)
    tile_do = load_queries(inputs.grad_o, head, first, head.problem.value_dim, BLOCK_M, BLOCK_DV)
    statistics = query_statistics(inputs, head, first, BLOCK_M)
    queries = queries_from(head, first, gains(head, first, BLOCK_M))
    sums = over_keys(
        accumulate_over_keys,
        head,
        QueryBlock(
            inputs.k, v, grad_gain, first, tile_q, tile_do, statistics, queries, BIAS_GRADIENT
        ),
        QuerySums(tl.zeros([BLOCK_M, BLOCK_D], tl.float32), no_query_gradients(head, BLOCK_M)),
        first,
        BLOCK_M,
        BLOCK_N,
    )
    dq, n_query = sums.dq * head.problem.scale, head.problem.n_query
    store_tile(grad_q, head.b, head.h, first, n_query, dq, head.problem.head_dim)
    if BIAS_GRADIENT and head.bias.form.store_query_gradients is not None:
        head.bias.form.store_query_gradients(
            head, first, queries, sums.bias, grad_gain, grad_others
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
    (forms/). If the bias is a function of beta, these are grad_gain_i = sum_j dS_ij
    dbeta_ij/dg_i and grad_others_i = sum_j dS_ij dbeta_ij/dC[p_i], (B, H, Nq) each.

    Invariant: after each key tile, the accumulators hold these sums over the keys so far.
    """
    group, block = group_and_block(problem, LAST_FIRST=True)
    b, h, first = group // problem.heads, group % problem.heads, block * BLOCK_M
    if is_past_end(problem, b, first, N_QUERY):
        return
    inputs = sequence_inputs(q, k, v, grad_o, lse_in_base_2, delta, problem, b)
    backward_block(
        inputs,
        sequence_queries(grad_q, problem, b),
        sequence_queries(grad_gain, problem, b)
        if bias.dense is None
        else sequence_pairs(grad_gain, problem, b),
        sequence_queries(grad_others, problem, b) if bias.function is None else grad_others,
        Head(
            SequenceBias(bias, per_token_operands(bias, problem, b)),
            SequenceProblem(problem, sequence_lengths(problem, b)),
            b,
            h,
        ),
        first,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
        BLOCK_DV,
        BIAS_GRADIENT,
    )
