"""Blocks of queries, the pages of a cache that hold their keys, and the logits of a tile of these.

The rows of a block are queries of all heads that share a key head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..bias.tile import log2
from ..primitives import INFINITY, LOG2E, dot, row_address


@triton.jit
def tile_rows(problem, block, BLOCK_M: tl.constexpr):
    """Heads of the group, queries and whether they exist, of the rows of a block: row r is query
    r % n_query of head r // n_query. [BLOCK_M]"""
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row < problem.group * problem.n_query
    row = tl.where(exists, row, 0)
    return row // problem.n_query, row % problem.n_query, exists


@triton.jit
def block_number():
    """Of a program's block of queries, among those of all sequences and key heads."""
    return tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)


@triton.jit
def page_of(problem, b, key):
    """The page that holds a key, and its row there."""
    column = key // problem.page_size % problem.columns
    page = tl.load(problem.block_table + b * problem.columns + column)
    return page, key % problem.page_size


@triton.jit
def load_rows(
    x, page, head, row, exists, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows row, row + 1, ... of a page, zero beyond DIM or where none exists. [ROWS, BLOCK]"""
    rows, channel = tl.arange(0, ROWS).to(tl.int64)[:, None], tl.arange(0, BLOCK)[None, :]
    return tl.load(
        row_address(x, page, head, row) + (rows * x.row + channel),
        exists[:, None] & (channel < DIM),
        other=0.0,
    )


@triton.jit
def load_queries(q, problem, b, h, i, exists, BLOCK: tl.constexpr):
    """[BLOCK_M, BLOCK], zero where they do not exist."""
    channel = tl.arange(0, BLOCK)[None, :]
    return tl.load(
        row_address(q, b, h, i)[:, None] + channel,
        exists[:, None] & (channel < problem.head_dim),
        other=0.0,
    )


@triton.jit
def range_of_tiles(problem, p, exists, length, TILE: tl.constexpr):
    """The tiles that hold keys that some row sees: the first, the end, and the lowest position."""
    first_position = tl.min(tl.where(exists, p, length))
    begin = tl.maximum(first_position - problem.window + 1, 0) // TILE
    end = tl.cdiv(tl.max(tl.where(exists, p, -1)) + 1, TILE)
    return begin, tl.maximum(begin, end), first_position


@triton.jit
def page_bias(bias, problem, b, h, p, gain, query_sums, page, row, j, sees):
    """In base 2, of rows with positions p [BLOCK_M, 1] and keys j [1, BLOCK_N]; any number where
    sees is False."""
    if bias.form == "none":
        values = 0.0
    elif bias.form == "distance":
        table = row_address(bias.terms, b, h, 0)[:, None]
        values = tl.load(table + (p - j), sees, 0.0) * LOG2E
    elif bias.form == "dense":
        i = p - (tl.load(problem.lengths + b).to(tl.int32) - problem.n_query)
        address = row_address(bias.terms, b, h, 0)[:, None]
        address += tl.cast(i, tl.int64) * bias.terms.row + j
        values = tl.load(address, sees, 0.0).to(tl.float32) * LOG2E
    else:
        if bias.form == "linear":
            difference = (p - j).to(tl.float32)
        else:
            # In float64, as the sums are: near pairs are as exact at position one million.
            address = row_address(bias.terms, page, h, row)[:, None]
            sums = tl.load(address + tl.arange(0, j.shape[1])[None, :], sees, 0.0)
            difference = (query_sums[:, None] - sums).to(tl.float32)
        beta = gain[:, None] * difference
        values = -log2(1 + beta * beta) if bias.squared else beta * LOG2E
    return values


@triton.jit
def page_logits(tile_q, tile_k, bias, problem, b, h, p, gain, query_sums, exists, page, row, j):
    """In base 2, of keys j [BLOCK_N] from a row of a page on; -inf where they are not seen.
    [BLOCK_M, BLOCK_N]"""
    p, j = p[:, None], j[None, :]
    sees = exists[:, None] & (j <= p) & (p - j < problem.window)
    s = dot(tile_q, tl.trans(tile_k)) * problem.scale_in_base_2
    s += page_bias(bias, problem, b, h, p, gain, query_sums, page, row, j, sees)
    return tl.where(sees, s, -INFINITY)


@triton.jit
def add_logits(s, m, l):
    """The running softmax with logits s: weights, the factor of what was before, m and l."""
    m_new = tl.maximum(m, tl.max(s, 1))
    pivot = tl.where(m_new == -INFINITY, 0.0, m_new)
    weights, shrink = tl.exp2(s - pivot[:, None]), tl.exp2(m - pivot)
    return weights, shrink, m_new, l * shrink + tl.sum(weights, 1)


@triton.jit
def query_bias(bias, problem, b, h, i, p, exists):
    """What a bias has of queries: gains, which of a linear one are -slopes, and sums."""
    gain = tl.full(i.shape, 1.0, tl.float32)
    sums = tl.zeros(i.shape, tl.float64)
    if bias.form == "linear":
        gain = -tl.load(row_address(bias.terms, b, h, 0))
    if bias.gain is not None:
        gain = tl.load(row_address(bias.gain, b, h, 0) + i)
    if bias.form == "cumulative":
        page, row = page_of(problem, b, tl.maximum(p, 0))
        page = tl.maximum(page, 0)  # that of a position before the first key, which has no page
        sums = tl.load(row_address(bias.terms, page, h, row), exists & (p >= 0), 0.0)
    return gain, sums
