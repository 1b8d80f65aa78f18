"""The bias of a tile that is a product of a vector per query, or per key, and one per distance.

The distances p - j of a tile of M queries and N keys are M + N - 1 consecutive numbers. So one
matrix product E of the vectors of the queries and those of the distances has the bias of every
pair, though not in its place: that of row m and column n is at distance m - n + N - 1 from the
smallest (shear.py moves it there, and gradients back). The same holds for the vectors of keys.
Those of a tile's rows are the left operand of E, and those of its columns the right one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import dot, load_queries, load_tile, position, row_address
from .shear import column_numbers, difference, elements, elements_or_zeros, row_numbers, sum_above


@triton.constexpr_function
def padded_rank(rank):
    """Returns the number of columns of a tile of vectors: at least the minimum of matrix units."""
    return max(16, triton.next_power_of_2(rank))


@triton.constexpr_function
def distances_of(block_m, block_n):
    """Returns the number of distances that a tile's matrix products include."""
    return triton.next_power_of_2(block_m + block_n)


@triton.jit
def first_column(head):
    """Returns the distance of the first row of the tables."""
    return 0 if head.problem.causal else -(head.bias.vector_tables.columns // 2)


@triton.jit
def may_be_biased(head, smallest, COUNT: tl.constexpr):
    """Returns whether the bias may differ from 0 at the distances smallest, smallest + 1, ..."""
    first = first_column(head)
    inside = (smallest + COUNT > first) & (smallest < first + head.bias.vector_tables.columns)
    # Tiles beyond a band have loops of their own where these are factored (tile_ranges.py).
    return inside | (head.bias.factored or head.bias.vector_tables.last)


@triton.jit
def distance_vectors(head, table, smallest, RANK: tl.constexpr, COUNT: tl.constexpr):
    """Returns the vectors of the distances smallest, smallest + 1, ... [COUNT, padded rank]"""
    n = smallest - first_column(head) + tl.arange(0, COUNT)[:, None]
    nearest = tl.minimum(tl.maximum(n, 0), head.bias.vector_tables.columns - 1)
    channel = tl.arange(0, padded_rank(RANK))[None, :]
    exists = ((n == nearest) | head.bias.vector_tables.last) & (channel < RANK)
    address = row_address(table, 0, head.h, 0) + (nearest * table.row + channel)
    return tl.load(address, exists, other=0.0)


@triton.jit
def query_vectors(head, first, BLOCK_M: tl.constexpr):
    """Returns the vectors of queries first, first + 1, ... [BLOCK_M, padded rank]"""
    RANK: tl.constexpr = head.bias.vector_tables.query_rank
    return load_queries(head.bias.query_vectors, head, first, RANK, BLOCK_M, padded_rank(RANK))


@triton.jit
def key_vectors(head, first, BLOCK_N: tl.constexpr):
    """Returns the vectors of keys first, first + 1, ... [BLOCK_N, padded rank]"""
    RANK: tl.constexpr = head.bias.vector_tables.key_rank
    return load_tile(
        head.bias.key_vectors,
        head.b,
        head.h,
        first,
        head.problem.n_key,
        RANK,
        BLOCK_N,
        padded_rank(RANK),
    )


@triton.jit
def terms(
    vectors,
    distances,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OF_ROWS: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):
    """Returns the products of the vectors of a tile's rows, or columns, and of the distances of its
    pairs, [ROWS, COLUMNS]."""
    row, column = row_numbers(ROWS), column_numbers(COLUMNS)
    distance = difference(column, row, ROWS) if KEYS_FIRST else difference(row, column, COLUMNS)
    if OF_ROWS:
        products = elements(dot(vectors, tl.trans(distances)), row, distance, ROWS, COLUMNS)
    else:
        products = elements(dot(distances, tl.trans(vectors)), distance, column, ROWS, COLUMNS)
    return products


@triton.jit
def sum_of_terms(head, queries, keys, smallest, KEYS_FIRST: tl.constexpr):
    """Returns the sum of the terms that a relative bias has."""
    BLOCK_M: tl.constexpr = queries.gain.shape[0]
    BLOCK_N: tl.constexpr = keys.sums.high.shape[0]
    ROWS: tl.constexpr = BLOCK_N if KEYS_FIRST else BLOCK_M
    COLUMNS: tl.constexpr = BLOCK_M if KEYS_FIRST else BLOCK_N
    COUNT: tl.constexpr = distances_of(BLOCK_M, BLOCK_N)
    values = 0.0
    if head.bias.query_vectors is not None:
        RANK: tl.constexpr = head.bias.vector_tables.query_rank
        table = head.bias.vector_tables.queries
        vectors = query_vectors(head, queries.first - position(head.problem, 0), BLOCK_M)
        distances = distance_vectors(head, table, smallest, RANK, COUNT)
        values = terms(vectors, distances, ROWS, COLUMNS, not KEYS_FIRST, KEYS_FIRST)
    if head.bias.key_vectors is not None:
        KEY_RANK: tl.constexpr = head.bias.vector_tables.key_rank
        key_table = head.bias.vector_tables.keys
        of_keys = key_vectors(head, keys.first, BLOCK_N)
        key_distances = distance_vectors(head, key_table, smallest, KEY_RANK, COUNT)
        values = terms(of_keys, key_distances, ROWS, COLUMNS, KEYS_FIRST, KEYS_FIRST) + values
    return values


@triton.jit
def relative_bias(head, queries, keys, KEYS_FIRST: tl.constexpr):
    """Returns the bias of a tile, [BLOCK_M, BLOCK_N], or its transpose with KEYS_FIRST."""
    BLOCK_M: tl.constexpr = queries.gain.shape[0]
    BLOCK_N: tl.constexpr = keys.sums.high.shape[0]
    smallest = queries.first - keys.first - (BLOCK_N - 1)
    values = tl.zeros([BLOCK_N, BLOCK_M] if KEYS_FIRST else [BLOCK_M, BLOCK_N], tl.float32)
    if may_be_biased(head, smallest, distances_of(BLOCK_M, BLOCK_N)):
        values = sum_of_terms(head, queries, keys, smallest, KEYS_FIRST)
    return values


@triton.jit
def add_vector_gradients(
    head, table, queries, keys, grad_s, grad_vectors, RANK: tl.constexpr, OF_KEYS: tl.constexpr
):
    """Adds to the gradients [rows, padded rank] of the vectors of a tile's rows what its dS
    contributes. grad_s is [BLOCK_M, BLOCK_N], or its transpose with OF_KEYS."""
    ROWS: tl.constexpr = grad_s.shape[0]
    COLUMNS: tl.constexpr = grad_s.shape[1]
    BLOCK_N: tl.constexpr = ROWS if OF_KEYS else COLUMNS
    COUNT: tl.constexpr = distances_of(ROWS, COLUMNS)
    smallest = queries.first - keys.first - (BLOCK_N - 1)
    if may_be_biased(head, smallest, COUNT):
        distances = distance_vectors(head, table, smallest, RANK, COUNT)
        row, number = row_numbers(ROWS), column_numbers(COUNT)
        column = sum_above(number, row, ROWS) if OF_KEYS else difference(row, number, COLUMNS)
        by_distance = elements_or_zeros(grad_s.to(distances.dtype), row, column, ROWS, COUNT)
        grad_vectors = dot(by_distance, distances, grad_vectors)
    return grad_vectors


@triton.jit
def page_key_terms(head, queries, keys, sees, REAL: tl.constexpr):
    """Returns the products of the vectors of the keys of a page and those of the distances to few
    queries, which are not negative, summed in REAL. [BLOCK_M, BLOCK_N]"""
    h, distance = head.h[:, None], queries.p[:, None] - keys.j[None, :]
    rows = tl.arange(0, keys.j.shape[0]).to(tl.int64)[None, :] * head.bias.key_vectors.row
    vectors = row_address(head.bias.key_vectors, keys.page, h, keys.row) + rows
    column = tl.minimum(distance, head.bias.vector_tables.columns - 1)
    table = row_address(head.bias.vector_tables.keys, 0, h, column)
    exists = sees & ((distance == column) | head.bias.vector_tables.last)
    values = tl.zeros(sees.shape, REAL)
    for r in range(head.bias.vector_tables.key_rank):
        vector = tl.load(vectors + r, exists, 0.0).to(REAL)
        values += vector * tl.load(table + r, exists, 0.0).to(REAL)
    return values
