"""The bias of the keys of a page and its upper bound, computed from the operands of a form."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ... import shared_constants
from ..primitives import INFINITY, dot, limited_gain, row_address
from .pages import page_of

PEAK_DISTANCES = tl.constexpr(shared_constants.PEAK_DISTANCES)


class Queries(NamedTuple):
    """The queries of a block: positions, whether they exist, gains (-slopes for a linear bias) and
    prefix sums. [BLOCK_M] each, with the heads in Head.h."""

    p: tl.tensor
    exists: tl.tensor
    gain: tl.tensor
    sums: tl.tensor


class PageKeys(NamedTuple):
    """Keys j [BLOCK_N], which start at a row of a page."""

    page: tl.tensor
    row: tl.tensor
    j: tl.tensor


class KeyTiles(NamedTuple):
    """Tiles of keys: their pages and places in them, [BLOCK_N] each; their distances to queries,
    and the blocks of a table that these are in, of which there are at most two per tile, [BLOCK_M,
    BLOCK_N] each."""

    page: tl.tensor
    place: tl.tensor
    nearest: tl.tensor
    farthest: tl.tensor
    near_block: tl.tensor
    far_block: tl.tensor


@triton.jit
def block_queries(head, i, p, exists):
    """Returns the Queries of a block: queries i at positions p."""
    gain = tl.full(i.shape, 1.0, tl.float32)
    sums = tl.zeros(i.shape, tl.float64)
    if head.bias.slopes is not None:
        gain = -limited_gain(tl.load(row_address(head.bias.slopes, head.b, head.h, 0)))
    if head.bias.gain is not None:
        gain = tl.load(row_address(head.bias.gain, head.b, head.h, 0) + i)
        if head.bias.function is None:
            gain = limited_gain(gain)
    if head.bias.sums is not None:
        page, row = page_of(head.problem, head.b, tl.maximum(p, 0))
        page = tl.maximum(page, 0)  # a sequence without keys has no page
        sums = tl.load(row_address(head.bias.sums, page, head.h, row), exists & (p >= 0), 0.0)
    return Queries(p, exists, gain, sums)


@triton.jit
def highest_bias(head, bounds, queries, first, page, place):
    """Returns upper bounds on the bias of the tiles of keys that start at `first`, in a place of a
    page, in natural logarithms. [BLOCK_M, BLOCK_N], float64"""
    p, last = queries.p[:, None], first[None, :] + head.problem.tile_keys - 1
    nearest = tl.minimum(p - last, head.problem.window - 1)
    farthest = tl.minimum(p - first[None, :], head.problem.window - 1)
    near_block, far_block = nearest // PEAK_DISTANCES, farthest // PEAK_DISTANCES
    tiles = KeyTiles(page, place, nearest, farthest, near_block, far_block)
    return head.bias.form.highest_bias(head, bounds, queries, tiles)


@triton.jit
def page_logits(head, tile_q, tile_k, queries, keys, REAL: tl.constexpr):
    """Returns the logits in base 2, -inf where they are masked. [BLOCK_M, BLOCK_N], float32

    REAL: in which the bias sums products, float32 or float64.
    """
    p, j = queries.p[:, None], keys.j[None, :]
    sees = queries.exists[:, None] & (j <= p) & (p - j < head.problem.window)
    s = dot(tile_q, tl.trans(tile_k)) * head.problem.scale_in_base_2
    if head.bias.form.page_bias is not None:
        s += head.bias.form.page_bias(head, queries, keys, sees, REAL)
    return tl.where(sees, s, -INFINITY)
