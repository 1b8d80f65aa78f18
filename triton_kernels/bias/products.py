"""The products of factors in the loops over tiles, one tile ahead if the bias says so.

Besides the product, the logits have an offset that depends on C at the origins of the tiles: see
factors.py.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..primitives import LOG2E, dot, position
from .factors import key_origin, query_origin, tile_key_factors, tile_query_factors
from .tile import prefix_difference


class QueryTerms(NamedTuple):
    """The terms of the logits of a block of queries.

    factors, origin: of the queries, see query_factors and query_origin. difference: C[p] minus C at
    the origin. slope, intercept: for a tile of keys whose origin is o, intercept + slope (C at the
    queries' origin - C[o]) is the part of the logits that is constant along the keys. offset: this
    part without factors.
    """

    factors: tl.tensor
    origin: tl.tensor
    difference: tl.tensor
    slope: tl.tensor
    intercept: tl.tensor
    offset: tl.tensor


class KeyTerms(NamedTuple):
    """C at the origin of a tile of keys and, if it is computed one tile ahead, the product of its
    factors and those of the queries, else zeros."""

    origin: tl.tensor
    product: tl.tensor


class TileFactors(NamedTuple):
    """The factors of a tile of queries, whose first position is p, and of a block of keys; C at
    their origins; and the product of the factors, [BLOCK_N, BLOCK_M]."""

    p: tl.tensor
    query_origin: tl.tensor
    key_origin: tl.tensor
    queries: tl.tensor
    keys: tl.tensor
    product: tl.tensor


@triton.jit
def next_tile(first, end, BLOCK: tl.constexpr):
    """Returns the start of the tile after the one at `first`, or of the last tile again."""
    # The result is never negative; stating so lets the compiler simplify addresses.
    return tl.maximum(tl.minimum(first + BLOCK, end - BLOCK), 0)


@triton.jit
def origin_difference(head, origin_of_queries, origin_of_keys):
    """Returns the difference of C at two origins in float32, or 0 for tables, which have no C."""
    difference = 0.0
    if head.bias.table is None:
        difference = (origin_of_queries - origin_of_keys).to(tl.float32)
    return difference


@triton.jit
def query_terms(head, queries, first, lse, part):
    """Returns the QueryTerms of queries first, first + 1, ... in a part of the keys, with -lse in
    the offset unless lse is None."""
    BLOCK_M: tl.constexpr = queries.gain.shape[0]
    offset = 0.0 if lse is None else -lse
    terms = QueryTerms(0.0, 0.0, 0.0, 0.0, 0.0, offset)
    if part.has_factors:
        factors = tile_query_factors(head, first, BLOCK_M, part.side)
        origin = query_origin(head, queries.first, BLOCK_M, part.side)
        difference = prefix_difference(origin, queries.sums)
        slope = (part.side * LOG2E) * queries.gain
        intercept = slope * difference
        if lse is not None:
            intercept -= lse
        terms = QueryTerms(factors, origin, difference, slope, intercept, offset)
    return terms


@triton.jit
def key_offset(head, terms, key_terms, part):
    """Returns the part of the logits that is constant along a tile of keys. [BLOCK_M]"""
    offset = terms.offset
    if part.has_factors and head.bias.table is None:
        difference = origin_difference(head, terms.origin, key_terms.origin)
        offset = terms.intercept + terms.slope * difference
    return offset


@triton.jit
def key_product(head, queries, terms, j, part, remaining=None):
    """Returns the product of the factors of the queries and of keys j, j + 1, ...: the initial
    accumulator of the logits. [BLOCK_M, block]"""
    factors = tile_key_factors(head, queries.first, j, part.block, part.side, remaining)
    return dot(terms.factors, tl.trans(factors))


@triton.jit
def first_key_terms(head, queries, terms, part):
    """Returns the KeyTerms of the first tile of keys of a part."""
    origin = 0.0
    product = tl.zeros([queries.gain.shape[0], part.block], tl.float32)
    if part.has_factors:
        origin = key_origin(head, part.begin, part.block, part.side)
        if head.bias.ahead:
            remaining = part.end - part.begin
            product = key_product(head, queries, terms, part.begin, part, remaining)
    return KeyTerms(origin, product)


@triton.jit
def with_key_product(head, queries, terms, key_terms, j, part):
    """Returns the KeyTerms of the tile of keys j, j + 1, ... with the product of its factors."""
    if part.has_factors and not head.bias.ahead:
        key_terms = KeyTerms(key_terms.origin, key_product(head, queries, terms, j, part))
    return key_terms


@triton.jit
def next_key_terms(head, queries, terms, key_terms, j, part):
    """Returns the KeyTerms of the tile after that of keys j, j + 1, ..."""
    if part.has_factors:
        next_j = next_tile(j, part.end, part.block)
        product = key_terms.product
        if head.bias.ahead:
            product = key_product(head, queries, terms, next_j, part)
        key_terms = KeyTerms(key_origin(head, next_j, part.block, part.side), product)
    return key_terms


@triton.jit
def first_tile_factors(head, keys, part):
    """Returns the TileFactors of the first tile of queries of a part."""
    BLOCK_N: tl.constexpr = keys.sums.high.shape[0]
    product = tl.zeros([BLOCK_N, part.block], tl.float32)
    tile = TileFactors(0, 0.0, 0.0, 0.0, 0.0, product)
    if part.has_factors:
        p, remaining = position(head.problem, part.begin), part.end - part.begin
        from_keys = key_origin(head, keys.first, BLOCK_N, part.side)
        from_queries = query_origin(head, p, part.block, part.side)
        queries = tile_query_factors(head, part.begin, part.block, part.side, remaining)
        factors = tile_key_factors(head, p, keys.first, BLOCK_N, part.side, remaining)
        if head.bias.ahead:
            product = dot(factors, tl.trans(queries))
        tile = TileFactors(p, from_queries, from_keys, queries, factors, product)
    return tile


@triton.jit
def query_offset(head, queries, tile, lse, part):
    """Returns the part of the logits that is constant along the keys, if lse is not in the factors
    of the queries, else the part that is constant along both. [block]"""
    offset = -lse
    if part.has_factors and head.bias.table is None:
        difference = origin_difference(head, tile.query_origin, tile.key_origin)
        offset = queries.gain * ((part.side * LOG2E) * difference)
    return offset


@triton.jit
def query_product(head, keys, tile, i, part):
    """Returns the TileFactors with the factors of queries i, i + 1, ..., and the product."""
    queries, factors = tile.queries, tile.keys
    if head.bias.table is None:
        queries = tile_query_factors(head, i, part.block, part.side)
    else:
        factors = tile_key_factors(head, tile.p, keys.first, factors.shape[0], part.side)
    product = dot(factors, tl.trans(queries))
    return TileFactors(tile.p, tile.query_origin, tile.key_origin, queries, factors, product)


@triton.jit
def with_query_product(head, keys, tile, i, part):
    """Returns the TileFactors of queries i, i + 1, ... with the product."""
    if part.has_factors and not head.bias.ahead:
        tile = query_product(head, keys, tile, i, part)
    return tile


@triton.jit
def next_tile_factors(head, keys, tile, i, part):
    """Returns the TileFactors of the tile after that of queries i, i + 1, ..."""
    if part.has_factors:
        next_i = next_tile(i, part.end, part.block) if head.bias.ahead else i + part.block
        p = position(head.problem, next_i)
        # Queries after a key have a position of 0 or more.
        EXISTS: tl.constexpr = head.bias.ahead and part.side > 0
        origin = query_origin(head, p, part.block, part.side, EXISTS)
        tile = TileFactors(p, origin, tile.key_origin, tile.queries, tile.keys, tile.product)
        if head.bias.ahead:
            tile = query_product(head, keys, tile, next_i, part)
    return tile
