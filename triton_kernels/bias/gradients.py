"""The gradients of the operands of a bias, accumulated over the tiles of a block.

The gradient of a pair is its dS. In parts with factors, dS times factors is summed over the tiles,
and the gradients are computed from the sums (bias/factors.py).

IN_TWO: see times_factors.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .factors import (
    gain_factors,
    query_gradient_sums,
    tile_key_factors,
    tile_query_factors,
    times_factors,
)
from .products import origin_difference


class QueryGradients(NamedTuple):
    """The gradients of a block of queries.

    gain: that of the gains, [BLOCK_M]. others: that of the form's other operands.
    """

    gain: tl.tensor
    others: tl.tensor


class QueryProducts(NamedTuple):
    """dS times key factors, summed over tiles, and the same sum with each tile weighted by C at the
    queries' origin minus C at the tile's origin. [BLOCK_M, columns] each."""

    plain: tl.tensor
    weighted: tl.tensor


@triton.jit
def no_query_gradients(head, BLOCK_M: tl.constexpr):
    zeros = tl.zeros([BLOCK_M], tl.float32)
    gradients = QueryGradients(zeros, zeros)
    if head.bias.form.no_query_gradients is not None:
        gradients = head.bias.form.no_query_gradients(head, BLOCK_M)
    return gradients


@triton.jit
def no_key_gradients(head, BLOCK_N: tl.constexpr):
    gradients = tl.zeros([BLOCK_N], tl.float32)
    if head.bias.form.no_key_gradients is not None:
        gradients = head.bias.form.no_key_gradients(head, BLOCK_N)
    return gradients


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
