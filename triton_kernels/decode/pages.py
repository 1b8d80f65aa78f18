"""Device functions of decoding: blocks of queries, pages of keys, and the online softmax.

The rows of a block are queries of all heads that share a key head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import INFINITY, row_address


@triton.jit
def tile_rows(problem, block, BLOCK_M: tl.constexpr):
    """Returns the head in the group, the query, and whether it exists, for each row of a block: row
    r is query r % n_query of head r // n_query. [BLOCK_M] each."""
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row < problem.group * problem.n_query
    row = tl.where(exists, row, 0)
    return row // problem.n_query, row % problem.n_query, exists


@triton.jit
def block_number():
    """Returns the index of the program's block of queries among all sequences and key heads."""
    return tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)


@triton.jit
def page_of(problem, b, key):
    """Returns the page that holds a key, and the row of the key in the page."""
    column = key // problem.page_size % problem.columns
    page = tl.load(problem.block_table + b * problem.columns + column)
    return page, key % problem.page_size


@triton.jit
def load_rows(
    x, page, head, row, exists, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Loads rows row, row + 1, ... of a page, zero beyond DIM and where a row does not exist.
    [ROWS, BLOCK]"""
    rows, channel = tl.arange(0, ROWS).to(tl.int64)[:, None], tl.arange(0, BLOCK)[None, :]
    return tl.load(
        row_address(x, page, head, row) + (rows * x.row + channel),
        exists[:, None] & (channel < DIM),
        other=0.0,
    )


@triton.jit
def load_queries(q, problem, b, h, i, exists, BLOCK: tl.constexpr):
    """Loads the queries of the rows of a block, zero where they do not exist. [BLOCK_M, BLOCK]"""
    channel = tl.arange(0, BLOCK)[None, :]
    return tl.load(
        row_address(q, b, h, i)[:, None] + channel,
        exists[:, None] & (channel < problem.head_dim),
        other=0.0,
    )


@triton.jit
def range_of_tiles(problem, p, exists, length, TILE: tl.constexpr):
    """Returns the range [begin, end) of tiles with keys visible to at least one row, and the lowest
    position of a row."""
    first_position = tl.min(tl.where(exists, p, length))
    begin = tl.maximum(first_position - problem.window + 1, 0) // TILE
    end = tl.cdiv(tl.max(tl.where(exists, p, -1)) + 1, TILE)
    return begin, tl.maximum(begin, end), first_position


@triton.jit
def query_at(problem, b, p):
    """Returns the number of the query at position p of sequence b."""
    return p - (tl.load(problem.lengths + b).to(tl.int32) - problem.n_query)


@triton.jit
def add_logits(s, m, l):
    """One step of the online softmax with logits s: returns the weights 2^(s - m), the factor that
    rescales previous sums, and the new m and l."""
    m_new = tl.maximum(m, tl.max(s, 1))
    pivot = tl.where(m_new == -INFINITY, 0.0, m_new)
    weights, rescale = tl.exp2(s - pivot[:, None]), tl.exp2(m - pivot)
    return weights, rescale, m_new, l * rescale + tl.sum(weights, 1)
