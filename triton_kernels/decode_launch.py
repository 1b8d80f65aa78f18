"""The decoding kernels on tensors: which keys may be left out, and parts of the others for as many
programs as a GPU has room for."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from ..sequences import empty_rows
from .decode import attn_decode_kernel, attn_decode_merge_kernel
from .decode_choice import attn_choose_kernel
from .launching import OPTIONS, SUMS_OVER_LANES, where_the_tensors_are
from .operands import Bias, Rows, per_head, rows
from .primitives import LOG2E

_MOST_KEYS, _TILE_BYTES = 64, 2**14  # of a tile, which has no more registers
_MOST_CHOICES = 32  # tiles of which it is decided at a time
_LEAST_ROWS, _MOST_ROWS = 16, 64  # of a matrix unit; of a block
_LEAST_TILES = 4  # of a part, so that merging it weighs little
# What fills a GPU: two programs on each of about as many multiprocessors as a large one has.
_PROGRAMS = 256
_MOST_PARTS = 64
_ENDLESS = 2**30  # a window longer than any sequence


class Pages(NamedTuple):
    """Sizes of a problem, and where its keys are: see BlockTable."""

    batch: int
    heads: int
    kv_heads: int
    group: int  # query heads that share a key head
    n_query: int
    window: int
    scale_in_base_2: float
    block_table: Tensor
    columns: int
    page_size: int
    lengths: Tensor
    head_dim: tl.constexpr
    value_dim: tl.constexpr
    # The tiles that each block of queries takes, of tile_keys, where not all; at most most_tiles.
    tile_keys: tl.constexpr
    most_tiles: int = 0
    lists: Tensor | None = None
    counts: Tensor | None = None


@where_the_tensors_are
def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    terms: Tensor | None,
    gain: Tensor | None,
    bounds: list[Tensor | None],
    form: str,
    scale: float,
    window: int | None,
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    """Returns o (B, H, Nq, Dv) in q's dtype and lse (B, H, Nq) in float32."""
    batch, heads, n_query, head_dim = q.shape
    _, kv_heads, page_size, value_dim = v.shape
    o = empty_rows(q, value_dim)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if lse.numel() == 0:
        return o, lse
    columns = block_table.shape[1]
    group = heads // kv_heads
    tile_keys = page_size // bounds[0].shape[2]
    problem = Pages(
        *(batch, heads, kv_heads, group, n_query, _ENDLESS if window is None else window),
        *(scale * LOG2E.value, block_table, columns, page_size, lengths),
        *map(constexpr, (head_dim, value_dim, tile_keys)),
    )
    squared = form == "log1p_square"
    if squared or form == "cumulative":
        terms = rows(terms)
        flags = "cumulative", squared, False
    else:
        terms, flags = per_head(terms), (form, False, False)
    bias = Bias(*map(constexpr, flags), terms, per_head(gain))

    block_m = min(_MOST_ROWS, max(_LEAST_ROWS, triton.next_power_of_2(group * n_query)))
    block_d, block_dv = (max(16, triton.next_power_of_2(x)) for x in (head_dim, value_dim))
    fitting = _TILE_BYTES // (max(block_d, block_dv) * q.element_size())
    block_n = min(_MOST_KEYS, page_size, max(16, fitting))
    blocks = batch * kv_heads, triton.cdiv(group * n_query, block_m)
    single = q.dtype == torch.float32
    options = {"BLOCK_M": block_m, "BLOCK_D": block_d, **OPTIONS}
    if tolerance > 0 and form != "none":
        problem = _with_lists(problem, blocks)
        attn_choose_kernel[blocks](
            *(rows(q), rows(k), *_bounds(bounds, form), bias, problem),
            *(math.log(tolerance / tile_keys), 2.0**-23 * (4 * head_dim + 256)),
            BLOCK_N=min(_MOST_CHOICES, block_n),
            num_warps=4,
            num_stages=3,
            **options,
        )
    parts = _parts(blocks[0] * blocks[1], columns * page_size // block_n)
    acc = lse.new_empty((parts, *o.shape))
    m, l = lse.new_empty((2, parts, *lse.shape))
    attn_decode_kernel[(*blocks, parts)](
        *map(rows, (q, k, v)),
        *(acc, m, l, bias, problem),
        BLOCK_N=block_n,
        BLOCK_DV=block_dv,
        num_warps=8 if single else 4,
        num_stages=1 if single else 2,
        **options,
    )
    attn_decode_merge_kernel[(lse.numel(),)](
        *(acc, m, l, rows(o), rows(lse), problem, parts),
        PARTS=triton.next_power_of_2(parts),
        BLOCK_DV=block_dv,
        **SUMS_OVER_LANES,
    )
    return o, lse


def _with_lists(problem: Pages, blocks: tuple[int, int]) -> Pages:
    """With room for the tiles that each block of queries takes."""
    # In a full ring the oldest tile may stand where the newest does.
    most = problem.columns * problem.page_size // problem.tile_keys.value + 1
    lists = problem.block_table.new_empty((math.prod(blocks), most))
    return problem._replace(most_tiles=most, lists=lists, counts=lists.new_empty(len(lists)))


def _bounds(bounds: list[Tensor | None], form: str) -> list[Rows | None]:
    """Centres and extents of tiles, lowest and highest sums, or a table's peaks as the highest."""
    centres, extents, lowest, highest = bounds
    if lowest is not None:
        return [*map(rows, bounds)]
    return [rows(centres), rows(extents), None, per_head(highest) if form == "distance" else None]


def _parts(programs: int, tiles: int) -> int:
    """How many parts the keys of a sequence are cut into; their length need not be known here."""
    wanted = triton.cdiv(_PROGRAMS, programs)
    return max(1, min(wanted, tiles // _LEAST_TILES, _MOST_PARTS))
