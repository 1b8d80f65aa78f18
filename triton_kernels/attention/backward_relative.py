"""The gradients of the tables of a relative bias: sums of dS times vectors along diagonals."""

from __future__ import annotations

import triton
import triton.language as tl

from ..bias.relative import key_vectors, padded_rank, query_vectors
from ..bias.shear import column_numbers, difference, elements_or_zeros, row_numbers, sum_above
from ..bias.tile import keys_from, queries_from
from ..operands import Head
from ..primitives import dot, row_address
from ..sequences import (
    SequenceBias,
    SequenceProblem,
    per_token_operands,
    sequence_lengths,
)
from .backward import load_tiles, query_statistics, sequence_inputs, weights_and_gradients


@triton.jit
def tile_gradients(
    inputs,
    head,
    queries,
    i,
    j,
    grad_queries,
    grad_keys,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Adds the tile of queries i, i + 1, ... and keys j, j + 1, ... to the gradients of the tables,
    [2 BLOCK, padded rank] each."""
    tiles = load_tiles(inputs, head, i, j, BLOCK, BLOCK_D, BLOCK_DV)
    statistics = query_statistics(inputs, head, i, BLOCK)
    grad_s = weights_and_gradients(
        head,
        tiles,
        queries,
        keys_from(head, j, BLOCK),
        -statistics.lse,
        statistics.delta,
        tl.zeros([BLOCK, BLOCK], tl.float32),
        MASKED=True,
        FACTORED=False,
        KEYS_FIRST=False,
    ).grad_s
    distance, x = row_numbers(2 * BLOCK), column_numbers(BLOCK)
    if head.bias.query_vectors is not None:
        vectors, key = query_vectors(head, i, BLOCK), difference(x, distance, BLOCK)
        by_distance = elements_or_zeros(grad_s.to(vectors.dtype), x, key, 2 * BLOCK, BLOCK)
        grad_queries = dot(by_distance, vectors, grad_queries)
    if head.bias.key_vectors is not None:
        vectors, query = key_vectors(head, j, BLOCK), sum_above(x, distance, BLOCK)
        by_key = tl.trans(grad_s.to(vectors.dtype))
        by_distance = elements_or_zeros(by_key, x, query, 2 * BLOCK, BLOCK)
        grad_keys = dot(by_distance, vectors, grad_keys)
    return grad_queries, grad_keys


@triton.jit
def diagonal_sums(
    inputs,
    partial_queries,
    partial_keys,
    diagonal,
    head,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Computes attn_bwd_relative_kernel for one sequence."""
    begin = tl.maximum(diagonal, 0)
    query_tiles, key_tiles = (
        tl.cdiv(head.problem.n_query, BLOCK),
        tl.cdiv(head.problem.n_key, BLOCK),
    )
    end = tl.minimum(query_tiles, key_tiles + diagonal)
    QUERY_RANK: tl.constexpr = head.bias.vector_tables.query_rank
    KEY_RANK: tl.constexpr = head.bias.vector_tables.key_rank
    grad_queries = tl.zeros([2 * BLOCK, padded_rank(QUERY_RANK)], tl.float32)
    grad_keys = tl.zeros([2 * BLOCK, padded_rank(KEY_RANK)], tl.float32)
    gain = tl.full([BLOCK], 1.0, tl.float32)
    for tile in range(begin, end):
        i, j = tile * BLOCK, (tile - diagonal) * BLOCK
        queries = queries_from(head, i, gain)
        if (queries.first_key < j + BLOCK) & (j < queries.end_key):
            grad_queries, grad_keys = tile_gradients(
                inputs,
                head,
                queries,
                i,
                j,
                grad_queries,
                grad_keys,
                BLOCK,
                BLOCK_D,
                BLOCK_DV,
            )
    if head.bias.query_vectors is not None:
        store_sums(partial_queries, grad_queries, QUERY_RANK)
    if head.bias.key_vectors is not None:
        store_sums(partial_keys, grad_keys, KEY_RANK)


@triton.jit
def store_sums(partial, sums, RANK: tl.constexpr):
    """Stores the sums of this program's diagonal, [2 BLOCK, padded rank]."""
    row, channel = tl.arange(0, sums.shape[0])[:, None], tl.arange(0, sums.shape[1])[None, :]
    address = row_address(partial, tl.program_id(0), tl.program_id(1), 0)
    tl.store(address + (row * RANK + channel), sums, channel < RANK)


@triton.jit
def attn_bwd_relative_kernel(
    q,
    k,
    v,
    grad_o,
    lse_in_base_2,
    delta,
    partial_queries,
    partial_keys,
    first_diagonal,
    bias,
    problem,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Sums dS times the vectors of the queries, and of the keys, over one diagonal of square tiles,
    all of which have the same distances.

    Diagonal t contains the tiles of query tile I and key tile I - t. partial (B H, diagonals, 2
    BLOCK, R) holds at x the sum over the pairs at the distance position(t BLOCK) + x + 1 - BLOCK.

    first_diagonal: an int or, with sequences, (B,) int32.
    """
    b, h = tl.program_id(0) // problem.heads, tl.program_id(0) % problem.heads
    diagonal = tl.program_id(1)
    diagonal += first_diagonal if problem.sequences is None else tl.load(first_diagonal + b)
    inputs = sequence_inputs(q, k, v, grad_o, lse_in_base_2, delta, problem, b)
    diagonal_sums(
        inputs,
        partial_queries,
        partial_keys,
        diagonal,
        Head(
            SequenceBias(bias, per_token_operands(bias, problem, b)),
            SequenceProblem(problem, sequence_lengths(problem, b)),
            b,
            h,
        ),
        BLOCK,
        BLOCK_D,
        BLOCK_DV,
    )
