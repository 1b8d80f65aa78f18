"""Device functions of decoding: blocks of queries, pages of keys, and the logits of a tile.

The rows of a block are queries of all heads that share a key head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..bias.relative import key_terms
from ..bias.segments import values_of
from ..bias.tile import log2
from ..primitives import INFINITY, LOG2E, dot, row_address


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
def page_bias(bias, problem, b, h, p, gain, query_sums, page, row, j, sees):
    """Returns the bias in base 2 of queries at positions p [BLOCK_M, 1] and keys j [1, BLOCK_N].
    Where sees is False, the value is arbitrary."""
    if bias.form == "none":
        values = 0.0
    elif bias.form == "distance":
        table = row_address(bias.terms, b, h, 0)[:, None]
        values = tl.load(table + (p - j), sees, 0.0) * LOG2E
    elif bias.form == "normalized":
        # In float64, so that tiles may be skipped by bounds that ignore its rounding errors.
        table = row_address(bias.terms, b, h, 0)[:, None]
        x = gain[:, None].to(tl.float64) * tl.load(table + (p - j), sees, 0.0)
        values = (values_of(bias.function, b, h[:, None], x) * LOG2E).to(tl.float32)
    elif bias.form == "relative":
        values = tl.zeros(sees.shape, tl.float32)
        if bias.terms is not None:
            terms = row_address(bias.terms, b, h[:, None], query_at(problem, b, p))
            values += tl.load(terms + tl.minimum(p - j, bias.tables.columns), sees, 0.0)
        if bias.key_vectors is not None:
            values += key_terms(bias, b, h[:, None], p, j, sees)
        values *= LOG2E
    elif bias.form == "dense":
        i = query_at(problem, b, p)
        address = row_address(bias.terms, b, h, 0)[:, None]
        address += tl.cast(i, tl.int64) * bias.terms.row + j
        values = tl.load(address, sees, 0.0).to(tl.float32) * LOG2E
    else:
        if bias.form == "linear":
            difference = (p - j).to(tl.float32)
        else:
            # Prefix sums are subtracted in float64, which is exact for near pairs at any position.
            address = row_address(bias.terms, page, h, row)[:, None]
            sums = tl.load(address + tl.arange(0, j.shape[1])[None, :], sees, 0.0)
            difference = (query_sums[:, None] - sums).to(tl.float32)
        beta = gain[:, None] * difference
        values = -log2(1 + beta * beta) if bias.squared else beta * LOG2E
    return values


@triton.jit
def page_logits(tile_q, tile_k, bias, problem, b, h, p, gain, query_sums, exists, page, row, j):
    """Returns the logits in base 2 of the keys j [BLOCK_N], which start at a row of a page; -inf
    where they are masked. [BLOCK_M, BLOCK_N]"""
    p, j = p[:, None], j[None, :]
    sees = exists[:, None] & (j <= p) & (p - j < problem.window)
    s = dot(tile_q, tl.trans(tile_k)) * problem.scale_in_base_2
    s += page_bias(bias, problem, b, h, p, gain, query_sums, page, row, j, sees)
    return tl.where(sees, s, -INFINITY)


@triton.jit
def add_logits(s, m, l):
    """One step of the online softmax with logits s: returns the weights 2^(s - m), the factor that
    rescales previous sums, and the new m and l."""
    m_new = tl.maximum(m, tl.max(s, 1))
    pivot = tl.where(m_new == -INFINITY, 0.0, m_new)
    weights, rescale = tl.exp2(s - pivot[:, None]), tl.exp2(m - pivot)
    return weights, rescale, m_new, l * rescale + tl.sum(weights, 1)


@triton.jit
def query_bias(bias, problem, b, h, i, p, exists):
    """Returns the gains (-slopes for a linear bias) and prefix sums of the queries. [BLOCK_M]
    each."""
    gain = tl.full(i.shape, 1.0, tl.float32)
    sums = tl.zeros(i.shape, tl.float64)
    if bias.form == "linear":
        gain = -tl.load(row_address(bias.terms, b, h, 0))
    if bias.gain is not None:
        gain = tl.load(row_address(bias.gain, b, h, 0) + i)
    if bias.form == "cumulative":
        page, row = page_of(problem, b, tl.maximum(p, 0))
        page = tl.maximum(page, 0)  # a sequence without keys has no page
        sums = tl.load(row_address(bias.terms, page, h, row), exists & (p >= 0), 0.0)
    return gain, sums
