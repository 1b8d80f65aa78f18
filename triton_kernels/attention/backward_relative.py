"""The gradients of the tables of a relative bias: sums of dS times vectors along diagonals."""

from __future__ import annotations

import triton
import triton.language as tl

from ..bias.relative import key_vectors, padded_rank, query_vectors, unshear
from ..primitives import dot, load_tile, row_address
from ..sequences import OwnBias, OwnProblem, own_keys, own_lengths, own_queries, own_rows
from .backward import query_statistics, weights_and_gradients
from .logits import key_side, query_side


@triton.jit
def tile_gradients(
    q,
    k,
    v,
    grad_o,
    lse_in_base_2,
    delta,
    bias,
    problem,
    b,
    h,
    queries,
    i,
    j,
    of_queries,
    of_keys,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Adds the tile of queries i, i + 1, ... and keys j, j + 1, ... to the gradients of the tables,
    [2 BLOCK, padded rank] each."""
    kv_head = h // problem.group
    # [BLOCK, BLOCK_D], [BLOCK, BLOCK_DV]
    tile_q = load_tile(q, b, h, i, problem.n_query, problem.head_dim, BLOCK, BLOCK_D)
    tile_do = load_tile(grad_o, b, h, i, problem.n_query, problem.value_dim, BLOCK, BLOCK_DV)
    tile_k = load_tile(k, b, kv_head, j, problem.n_key, problem.head_dim, BLOCK, BLOCK_D)
    tile_v = load_tile(v, b, kv_head, j, problem.n_key, problem.value_dim, BLOCK, BLOCK_DV)
    lse, d = query_statistics(lse_in_base_2, delta, problem, b, h, i, BLOCK)
    _, grad_s, _ = weights_and_gradients(
        *(bias, problem, b, h, tile_q, tile_k, tile_v, tile_do, -lse, d),
        *(queries, key_side(bias, problem, b, h, j, BLOCK), tl.zeros([BLOCK, BLOCK], tl.float32)),
        MASKED=True,
        FACTORED=False,
        KEYS_FIRST=False,
    )
    if bias.query_vectors is not None:
        vectors = query_vectors(bias, problem, b, h, i, BLOCK)
        by_distance = unshear(grad_s, OF_KEYS=False).to(vectors.dtype)
        of_queries = dot(tl.trans(by_distance), vectors, of_queries)
    if bias.key_vectors is not None:
        vectors = key_vectors(bias, problem, b, h, j, BLOCK)
        by_distance = unshear(tl.trans(grad_s), OF_KEYS=True).to(vectors.dtype)
        of_keys = dot(tl.trans(by_distance), vectors, of_keys)
    return of_queries, of_keys


@triton.jit
def diagonal_sums(
    q,
    k,
    v,
    grad_o,
    lse_in_base_2,
    delta,
    partial_of_queries,
    partial_of_keys,
    diagonal,
    bias,
    problem,
    b,
    h,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Computes attn_bwd_relative_kernel for one sequence."""
    begin = tl.maximum(diagonal, 0)
    end = tl.minimum(tl.cdiv(problem.n_query, BLOCK), tl.cdiv(problem.n_key, BLOCK) + diagonal)
    of_queries = tl.zeros([2 * BLOCK, padded_rank(bias.vector_tables.query_rank)], tl.float32)
    of_keys = tl.zeros([2 * BLOCK, padded_rank(bias.vector_tables.key_rank)], tl.float32)
    gain = tl.full([BLOCK], 1.0, tl.float32)
    for tile in range(begin, end):
        i, j = tile * BLOCK, (tile - diagonal) * BLOCK
        queries = query_side(bias, problem, b, h, i, gain, BLOCK)
        if (queries[3] < j + BLOCK) & (j < queries[4]):
            of_queries, of_keys = tile_gradients(
                *(q, k, v, grad_o, lse_in_base_2, delta, bias, problem, b, h, queries, i, j),
                *(of_queries, of_keys, BLOCK, BLOCK_D, BLOCK_DV),
            )
    if bias.query_vectors is not None:
        store_sums(partial_of_queries, of_queries, bias.vector_tables.query_rank)
    if bias.key_vectors is not None:
        store_sums(partial_of_keys, of_keys, bias.vector_tables.key_rank)


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
    partial_of_queries,
    partial_of_keys,
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
    diagonal_sums(
        own_queries(q, problem, b),
        own_keys(k, problem, b),
        own_keys(v, problem, b),
        own_queries(grad_o, problem, b),
        own_queries(lse_in_base_2, problem, b),
        own_queries(delta, problem, b),
        *(partial_of_queries, partial_of_keys, diagonal),
        OwnBias(bias, own_rows(bias, problem, b)),
        OwnProblem(problem, own_lengths(problem, b)),
        *(b, h, BLOCK, BLOCK_D, BLOCK_DV),
    )
