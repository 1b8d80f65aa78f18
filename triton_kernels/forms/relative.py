"""The forms `relative` and `relative_last`: products of a vector per query, or per key, and one per
distance (bias/relative.py).

attention/backward_relative.py has the gradients of the vectors of the distances.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from ... import shared_constants
from ..bias.gradients import QueryGradients
from ..bias.relative import add_vector_gradients, padded_rank, page_key_terms, relative_bias
from ..decode.pages import query_at
from ..operands import Bias, FormFunctions, VectorTables, per_head
from ..primitives import LOG2E, in_base_2, row_address, store_tile
from .base import Gathered, Kernels

PEAK_DISTANCES = tl.constexpr(shared_constants.PEAK_DISTANCES)


@triton.jit
def tile_bias(head, queries, keys, pairs, sees, KEYS_FIRST: tl.constexpr):
    return relative_bias(head, queries, keys, KEYS_FIRST) * LOG2E


@triton.jit
def page_bias(head, queries, keys, sees, REAL: tl.constexpr):
    values = tl.zeros(sees.shape, REAL)
    if head.bias.table is not None:
        p = queries.p[:, None]
        i = query_at(head.problem, head.b, p)
        table = row_address(head.bias.table, head.b, head.h[:, None], i)
        column = tl.minimum(p - keys.j[None, :], head.bias.vector_tables.columns)
        values += tl.load(table + column, sees, 0.0).to(REAL)
    if head.bias.key_vectors is not None:
        values += page_key_terms(head, queries, keys, sees, REAL)
    return in_base_2(values)


@triton.jit
def highest_bias(head, bounds, queries, tiles):
    highest = tl.zeros(tiles.nearest.shape, tl.float64)
    if head.bias.table is not None:
        i = query_at(head.problem, head.b, queries.p[:, None])
        table = row_address(bounds.table_highest, head.b, head.h[:, None], i)
        beyond = (head.bias.vector_tables.columns - 1) // PEAK_DISTANCES + 1
        at_nearest = tl.load(table + tl.minimum(tiles.near_block, beyond))
        at_farthest = tl.load(table + tl.minimum(tiles.far_block, beyond))
        highest += tl.maximum(at_nearest, at_farthest)
    if head.bias.key_vectors is not None:
        highest += highest_key_term(head, bounds, tiles)
    return highest


@triton.jit
def highest_key_term(head, bounds, tiles):
    """Returns the upper bound |W| |Q| on the products W . Q of the vectors of the keys of tiles and
    those of their distances. [BLOCK_M, BLOCK_N], float64"""
    h, columns = head.h[:, None], head.bias.vector_tables.columns
    key_norm = tl.load(
        row_address(bounds.highest, tiles.page[None, :], h, 0) + tiles.place[None, :]
    )
    norms = row_address(bounds.table_lowest, 0, h, 0)
    last_block = (columns - 1) // PEAK_DISTANCES
    exists = (tiles.nearest < columns) | head.bias.vector_tables.last
    at_nearest = tl.load(norms + tl.minimum(tiles.near_block, last_block), exists, 0.0)
    at_farthest = tl.load(norms + tl.minimum(tiles.far_block, last_block), exists, 0.0)
    return key_norm.to(tl.float64) * tl.maximum(at_nearest, at_farthest)


@triton.jit
def no_query_gradients(head, BLOCK_M: tl.constexpr):
    RANK: tl.constexpr = padded_rank(head.bias.vector_tables.query_rank)
    return QueryGradients(tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, RANK], tl.float32))


@triton.jit
def add_query_gradients(head, queries, keys, tile, gradients, grad_pairs, IN_TWO: tl.constexpr):
    """Adds a tile to the gradients of the vectors of the queries, [BLOCK_M, padded rank]."""
    RANK: tl.constexpr = head.bias.vector_tables.query_rank
    table, others = head.bias.vector_tables.queries, gradients.others
    others = add_vector_gradients(head, table, queries, keys, tile.grad_s, others, RANK, False)
    return QueryGradients(gradients.gain, others)


@triton.jit
def store_query_gradients(head, first, queries, gradients, grad_gain, grad_others):
    RANK: tl.constexpr = head.bias.vector_tables.query_rank
    n_query = head.problem.n_query
    store_tile(grad_others, head.b, head.h, first, n_query, gradients.others, RANK)


@triton.jit
def no_key_gradients(head, BLOCK_N: tl.constexpr):
    return tl.zeros([BLOCK_N, padded_rank(head.bias.vector_tables.key_rank)], tl.float32)


@triton.jit
def add_key_gradients(head, queries, keys, grad_s, gradients, IN_TWO: tl.constexpr):
    """Adds a tile to the gradients of the vectors of the keys, [BLOCK_N, padded rank]."""
    RANK: tl.constexpr = head.bias.vector_tables.key_rank
    table = head.bias.vector_tables.keys
    return add_vector_gradients(head, table, queries, keys, grad_s, gradients, RANK, True)


@triton.jit
def store_key_gradients(head, first, gradients, grad_keys):
    RANK: tl.constexpr = head.bias.vector_tables.key_rank
    store_tile(grad_keys, head.b, head.h, first, head.problem.n_key, gradients, RANK)


def _vectors(vectors: Tensor, _, key_vectors: Tensor, __) -> dict:
    return {"query_vectors": _present(vectors), "key_vectors": _present(key_vectors)}


def _products(vectors: Tensor, table: Tensor, key_vectors: Tensor, _, *, last: bool) -> dict:
    """Returns the operands of few queries. The table of a query holds the products of its vector,
    (B or 1, H or 1, Nq, n + 1), the last one for all distances beyond. It is float64 if products of
    vectors of keys, which may be large and of opposite sign, are added to it."""
    products, key_vectors = None, _present(key_vectors)
    if _present(vectors) is not None:
        products = vectors.double() @ table.double()
        products = products.float() if key_vectors is None else products
        beyond = products[..., -1:] if last else torch.zeros_like(products[..., -1:])
        products = torch.cat([products, beyond], -1)
    return {"table": products, "key_vectors": key_vectors}


def _table_bounds(bias: Bias) -> dict:
    """Returns the largest value of each query's table in each block of distances and, last, the one
    of all distances beyond, (B or 1, H or 1, Nq, blocks + 1)."""
    if bias.table is None:
        return {"table_highest": None}
    table, columns, size = bias.table.start, bias.vector_tables.columns, PEAK_DISTANCES.value
    missing = size * (triton.cdiv(columns, size) + 1) - columns
    whole = torch.cat([table[..., :-1], table[..., -1:].expand(*table.shape[:-1], missing)], -1)
    largest = whole.unflatten(-1, (-1, size)).amax(-1)
    # So that a NaN is not skipped.
    return {"table_highest": largest.nan_to_num(torch.inf, torch.inf, -torch.inf)}


def _present(vectors: Tensor) -> Tensor | None:
    return vectors if vectors.shape[3] else None


def _tables(_, query_tables: Tensor, __, key_tables: Tensor, *, last: bool) -> VectorTables:
    tables = [x.mT.contiguous() for x in (query_tables, key_tables)]
    columns, ranks = tables[0].shape[2], (constexpr(x.shape[3]) for x in tables)
    return VectorTables(*map(per_head, tables), columns, *ranks, constexpr(last))


def _gradient_shapes(bias: Bias, problem, blocks: int) -> dict:
    batch, heads, n_query, n_key = *problem.q.shape[:3], problem.k.shape[2]
    return {
        "grad_others": (batch, heads, n_query, bias.vector_tables.query_rank.value),
        "grad_keys": (batch, heads, n_key, bias.vector_tables.key_rank.value),
    }


def _gradients(gathered: Gathered) -> list[Tensor]:
    grad_query_tables, grad_key_tables = gathered.table()
    return [gathered.grad_others, grad_query_tables, gathered.grad_keys, grad_key_tables]


FUNCTIONS = FormFunctions(
    tile_bias=tile_bias,
    page_bias=page_bias,
    highest_bias=highest_bias,
    no_query_gradients=no_query_gradients,
    add_query_gradients=add_query_gradients,
    store_query_gradients=store_query_gradients,
    no_key_gradients=no_key_gradients,
    add_key_gradients=add_key_gradients,
    store_key_gradients=store_key_gradients,
)


def kernels(*, last: bool) -> Kernels:
    """Returns the entry of a form. last: see VectorTables."""
    return Kernels(
        (),
        FUNCTIONS,
        _gradients,
        _vectors,
        partial(_products, last=last),
        _table_bounds,
        gradient_shapes=_gradient_shapes,
        may_be_factored=lambda block_m, *tensors: not last,
        trains_queries=True,
        trains_keys=True,
        tables=partial(_tables, last=last),
    )
