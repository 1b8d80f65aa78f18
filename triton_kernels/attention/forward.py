"""The forward kernel: online softmax over the key tiles visible to a block of queries."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..bias.products import (
    first_key_terms,
    key_offset,
    next_key_terms,
    query_terms,
    with_key_product,
)
from ..bias.tile import Queries, gains, keys_from, queries_from
from ..operands import Head, Strided
from ..primitives import (
    INFINITY,
    LN2,
    LOWEST,
    dot,
    group_and_block,
    load_queries,
    row_address,
    store_tile,
)
from ..sequences import (
    N_QUERY,
    SequenceBias,
    SequenceProblem,
    is_past_end,
    per_token_operands,
    sequence_keys,
    sequence_lengths,
    sequence_queries,
)
from .logits import tile_logits
from .tile_ranges import next_keys, over_keys

# The exponent of the largest power of two in float16.
MAX_FLOAT16_EXPONENT = tl.constexpr(15)


class QueryBlock(NamedTuple):
    """A block of queries from `first` on, and the operands that it attends to."""

    k: Strided
    v: Strided
    first: tl.tensor
    q: tl.tensor
    queries: Queries


class Softmax(NamedTuple):
    """The state of the online softmax; see attn_fwd_kernel."""

    acc: tl.tensor
    m: tl.tensor
    l: tl.tensor


@triton.jit
def attend_keys(head, block, softmax, part):
    """Adds the key tiles of a part to the softmax."""
    BLOCK_D: tl.constexpr = block.q.shape[1]
    BLOCK_DV: tl.constexpr = softmax.acc.shape[1]
    terms = query_terms(head, block.queries, block.first, None, part)
    key_terms = first_key_terms(head, block.queries, terms, part)
    acc, m, l = softmax.acc, softmax.m, softmax.l
    for j in range(part.begin, part.end, part.block):
        # [block, BLOCK_D], [block, BLOCK_DV]
        tile_k = next_keys(block.k, head, j, part, head.problem.head_dim, BLOCK_D)
        tile_v = next_keys(block.v, head, j, part, head.problem.value_dim, BLOCK_DV)
        keys = keys_from(head, j, part.block)
        key_terms = with_key_product(head, block.queries, terms, key_terms, j, part)
        offset = key_offset(head, terms, key_terms, part)
        logits = tile_logits(
            head,
            block.q,
            tile_k,
            block.queries,
            keys,
            key_terms.product,
            MASKED=part.masked,
            FACTORED=part.factored,
            KEYS_FIRST=False,
        )
        highest = tl.max(logits.x, 1) * logits.multiplier
        m_new = tl.maximum(m, highest + offset)
        pivot = m_new - offset
        if tile_v.dtype == tl.float16:
            # Beyond a step of -1e9, m is rounded to hundreds, and weights relative to it could be
            # infinite. Raising the pivot keeps them finite; later keys make them negligible.
            pivot += tl.maximum(highest - pivot - MAX_FLOAT16_EXPONENT, 0.0)
        p = tl.exp2(logits.x * logits.multiplier - pivot[:, None])
        rescale = tl.exp2(m - m_new)
        l = l * rescale + tl.sum(p, 1)
        acc = dot(p.to(tile_v.dtype), tile_v, acc * rescale[:, None])
        m = m_new
        key_terms = next_key_terms(head, block.queries, terms, key_terms, j, part)
    return Softmax(acc, m, l)


@triton.jit
def attend(
    q,
    k,
    v,
    o,
    lse,
    pivot,
    log_sum,
    head,
    first,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Computes attn_fwd_kernel for the queries first ... first + BLOCK_M - 1 of one sequence."""
    if head.problem.same_row_stride:
        v = Strided(v.start, v.batch, v.head, k.row)
    # [BLOCK_M, BLOCK_D]
    tile_q = load_queries(q, head, first, head.problem.head_dim, BLOCK_M, BLOCK_D)
    queries = queries_from(head, first, gains(head, first, BLOCK_M))
    softmax = Softmax(
        acc=tl.zeros([BLOCK_M, BLOCK_DV], tl.float32),
        m=tl.full([BLOCK_M], LOWEST, tl.float32),
        l=tl.zeros([BLOCK_M], tl.float32),
    )
    block = QueryBlock(k, v, first, tile_q, queries)
    softmax = over_keys(attend_keys, head, block, softmax, first, BLOCK_M, BLOCK_N)

    n_query = head.problem.n_query
    has_keys = softmax.l != 0
    l = tl.where(has_keys, softmax.l, 1.0)
    normalized = softmax.acc / l[:, None]
    store_tile(o, head.b, head.h, first, n_query, normalized, head.problem.value_dim)
    log_sums = tl.where(has_keys, tl.log2(l), -INFINITY)
    values = ((softmax.m.to(tl.float64) + log_sums) * LN2).to(tl.float32)
    i = first + tl.arange(0, BLOCK_M)
    tl.store(row_address(lse, head.b, head.h, 0) + i, values, i < n_query)
    tl.store(row_address(pivot, head.b, head.h, 0) + i, softmax.m, i < n_query)
    tl.store(row_address(log_sum, head.b, head.h, 0) + i, log_sums, i < n_query)


@triton.jit
def attn_fwd_kernel(
    q,
    k,
    v,
    o,
    lse,
    pivot,
    log_sum,
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
        sequence_queries(q, problem, b),
        sequence_keys(k, problem, b),
        sequence_keys(v, problem, b),
        sequence_queries(o, problem, b),
        sequence_queries(lse, problem, b),
        sequence_queries(pivot, problem, b),
        sequence_queries(log_sum, problem, b),
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
    )
