"""The gradients of the operands of a bias, accumulated over the tiles of a block.

The gradient of a pair is its dS. In parts with factors, dS times factors is summed over the tiles,
and the gradients are computed from the sums (bias/factors.py).

IN_TWO: see times_factors.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ..primitives import row_address, store_tile
from .factors import (
    gain_factors,
    query_gradient_sums,
    round_to_operand,
    tile_key_factors,
    tile_query_factors,
    times_factors,
)
from .products import origin_difference
from .relative import add_vector_gradients, padded_rank
from .segments import add_segment_gradients
from .tile import negate_future, pair_address, pairs_of, table_values


class QueryGradients(NamedTuple):
    """The gradients of a block of queries.

    gain: [BLOCK_M]. others: those of the vectors of the queries, [BLOCK_M, padded rank], of
    intercepts and slopes, [2, segments], or of the prefix sums, divided by the gains, [BLOCK_M].
    """

    gain: tl.tensor
    others: tl.tensor


class QueryProducts(NamedTuple):
    """dS times key factors, summed over tiles, and the same sum with each tile weighted by C at the
    queries' origin minus C at the tile's origin. [BLOCK_M, columns] each."""

    plain: tl.tensor
    weighted: tl.tensor


@triton.jit
def no_query_gradients(bias, BLOCK_M: tl.constexpr):
    others = tl.zeros([BLOCK_M], tl.float32)
    if bias.function is not None:
        others = tl.zeros([2, bias.function.segments], tl.float32)
    elif bias.vector_tables is not None:
        others = tl.zeros([BLOCK_M, padded_rank(bias.vector_tables.query_rank)], tl.float32)
    return QueryGradients(tl.zeros([BLOCK_M], tl.float32), others)


@triton.jit
def no_query_products(bias, BLOCK_M: tl.constexpr):
    zeros = tl.zeros([BLOCK_M, bias.sum_columns], tl.float32)
    return QueryProducts(zeros, zeros)


@triton.jit
def add_query_products(
    head, queries, terms, key_terms, shared, j, part, grad_s, products, IN_TWO: tl.constexpr
):
    """Adds the dS of a tile times its key factors, which are `shared` unless queries have gains of
    their own."""
    factors = shared
    if head.bias.gain is not None:
        COLUMNS: tl.constexpr = head.bias.sum_columns
        factors = tile_key_factors(head, queries.first, j, part.block, part.side, None, COLUMNS)
    plain = times_factors(grad_s, factors, products.plain, IN_TWO)
    difference = origin_difference(head, terms.origin, key_terms.origin)
    return QueryProducts(plain, products.weighted + (plain - products.plain) * difference)


@triton.jit
def with_query_products(gradients, products, difference, SIDE: tl.constexpr):
    """Returns the gradients after adding those of a part with factors."""
    gain, others = query_gradient_sums(products.plain, products.weighted, difference, SIDE)
    return QueryGradients(gradients.gain + gain, gradients.others + others)


@triton.jit
def add_query_gradients(head, queries, keys, tile, gradients, grad_pairs, IN_TWO: tl.constexpr):
    """Adds the PairGradients of a tile, [BLOCK_M, BLOCK_N], to the gradients of its queries."""
    gain, others, grad_s = gradients.gain, gradients.others, tile.grad_s
    pairs = pairs_of(head, queries, keys, False)
    if head.bias.of_pairs is not None:
        address, exists = pair_address(grad_pairs, head, pairs)
        tl.store(address, grad_s, exists)
    elif head.bias.function is not None:
        t = table_values(head, pairs, tile.sees, 0.0)
        gain, others = add_segment_gradients(head, t, queries.gain, grad_s, gain, others)
    elif head.bias.vector_tables is not None:
        RANK: tl.constexpr = head.bias.vector_tables.query_rank
        table = head.bias.vector_tables.queries
        others = add_vector_gradients(head, table, queries, keys, grad_s, others, RANK, False)
    else:
        grad_gains, grad_sums = beta_gradients(head, pairs, grad_s, IN_TWO)
        gain += tl.sum(grad_gains, 1)
        others += tl.sum(grad_sums, 1)
    return QueryGradients(gain, others)


@triton.jit
def store_query_gradients(head, first, queries, gradients, grad_gain, grad_others):
    """Stores the gradients of the block of queries first, first + 1, ..."""
    BLOCK_M: tl.constexpr = gradients.gain.shape[0]
    i = first + tl.arange(0, BLOCK_M)
    exists = i < head.problem.n_query
    if head.bias.slopes is not None or head.bias.gain is not None:
        tl.store(row_address(grad_gain, head.b, head.h, 0) + i, gradients.gain, exists)
    if head.bias.function is not None:
        SEGMENTS: tl.constexpr = gradients.others.shape[1]
        n = tl.arange(0, 2)[:, None] * SEGMENTS + tl.arange(0, SEGMENTS)[None, :]
        address = row_address(grad_others, head.b, head.h, first // BLOCK_M)
        tl.store(address + n, gradients.others)
    elif head.bias.vector_tables is not None:
        RANK: tl.constexpr = head.bias.vector_tables.query_rank
        n_query = head.problem.n_query
        store_tile(grad_others, head.b, head.h, first, n_query, gradients.others, RANK)
    else:
        address = row_address(grad_others, head.b, head.h, 0) + i
        tl.store(address, gradients.others * queries.gain, exists)


@triton.jit
def no_key_gradients(bias, BLOCK_N: tl.constexpr):
    """Returns the gradients of a block of keys, 0: those of the vectors of the keys, [BLOCK_N,
    padded rank], or of the prefix sums, [BLOCK_N]."""
    gradients = tl.zeros([BLOCK_N], tl.float32)
    if bias.vector_tables is not None:
        gradients = tl.zeros([BLOCK_N, padded_rank(bias.vector_tables.key_rank)], tl.float32)
    return gradients


@triton.jit
def key_product_factors(head, queries, tile, shared, i, part, REUSED: tl.constexpr):
    """Returns the query factors that dS of a tile is multiplied by: those of the logits if REUSED
    or, if the queries have no gains of their own, `shared`."""
    factors = shared
    if REUSED:
        factors = tile.queries
    elif head.bias.gain is not None:
        COLUMNS: tl.constexpr = head.bias.sum_columns
        if part.factored:
            factors = tile_query_factors(head, i, part.block, part.side, None, COLUMNS)
        else:
            factors = gain_factors(head.problem, queries.gain, part.side, COLUMNS)
    return factors


@triton.jit
def add_key_gradients(head, queries, keys, grad_s, gradients, IN_TWO: tl.constexpr):
    """Adds the dS of a tile, [BLOCK_N, BLOCK_M], to the gradients of its keys."""
    if head.bias.vector_tables is not None:
        RANK: tl.constexpr = head.bias.vector_tables.key_rank
        table = head.bias.vector_tables.keys
        gradients = add_vector_gradients(head, table, queries, keys, grad_s, gradients, RANK, True)
    else:
        pairs = pairs_of(head, queries, keys, True)
        _, grad_sums = beta_gradients(head, pairs, grad_s, IN_TWO)
        gradients -= tl.sum(grad_sums * queries.gain[None, :], 1)
    return gradients


@triton.jit
def store_key_gradients(head, first, gradients, grad_keys):
    """Stores the gradients of the block of keys first, first + 1, ..."""
    if head.bias.vector_tables is not None:
        RANK: tl.constexpr = head.bias.vector_tables.key_rank
        store_tile(grad_keys, head.b, head.h, first, head.problem.n_key, gradients, RANK)
    else:
        j = first + tl.arange(0, gradients.shape[0])
        address = row_address(grad_keys, head.b, head.h, 0) + j
        tl.store(address, gradients, j < head.problem.n_key)


@triton.jit
def beta_gradients(head, pairs, grad_s, IN_TWO: tl.constexpr):
    """Returns the terms of the gradient of the gain, and those of the gradient of C[p] divided by
    the gain."""
    difference = negate_future(head.problem, pairs.difference, pairs)
    if head.bias.factored:
        grad_s = round_to_operand(grad_s, IN_TWO)
    if head.bias.squared:
        beta = pairs.gain * difference
        # Accurate to 2^-22 for divisors up to 2^126, and 0 for larger ones.
        grad_s *= libdevice.fast_dividef(-2 * beta, 1 + beta * beta)
    return grad_s * difference, negate_future(head.problem, grad_s, pairs)
