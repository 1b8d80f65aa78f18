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

from ... import problem as calls
from ...limits import rounding_of_logits
from ...sequences import empty_rows
from ..decode.append import attn_append_kernel
from ..decode.attention import attn_decode_kernel, attn_decode_merge_kernel
from ..decode.selection import attn_choose_kernel
from ..operands import Rows, per_head, rows
from ..primitives import LOG2E
from .forms import kernels_of
from .options import OPTIONS, SUMS_OVER_LANES, on_its_device

_MOST_KEYS, _TILE_BYTES = 64, 2**14  # of a tile, which has no more registers
_MOST_CHOICES = 32  # tiles of which it is decided at a time
_LEAST_ROWS, _MOST_ROWS = 16, 64  # of a matrix unit; of a block
_LEAST_TILES = 4  # of a part, so that merging it weighs little
# What fills a GPU: two programs on each of about as many multiprocessors as a large one has.
_PROGRAMS = 256
_MOST_PARTS = 64
_ENDLESS = 2**30  # a window longer than any sequence
_TOKENS = 16  # of a program that appends


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


@on_its_device
def decode(problem: calls.Problem) -> tuple[Tensor, Tensor]:
    """Returns o (B, H, Nq, Dv) in q's dtype and lse (B, H, Nq) in float32."""
    q, k, v = problem.q, problem.k, problem.v
    o = empty_rows(q, v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if lse.numel() == 0:
        return o, lse
    told, chooses = _told(problem), problem.tolerance > 0 and problem.form.may_skip
    bias = kernels_of(problem).bias_of_pages(problem.form)

    page_size, rows_of_group = told.page_size, told.group * told.n_query
    block_m = min(_MOST_ROWS, max(_LEAST_ROWS, triton.next_power_of_2(rows_of_group)))
    block_d, block_dv = (max(16, triton.next_power_of_2(x.shape[3])) for x in (q, v))
    fitting = _TILE_BYTES // (max(block_d, block_dv) * q.element_size())
    block_n = min(_MOST_KEYS, page_size, max(16, fitting))
    blocks = told.batch * told.kv_heads, triton.cdiv(rows_of_group, block_m)
    single = q.dtype == torch.float32
    options = {"BLOCK_M": block_m, "BLOCK_D": block_d, **OPTIONS}
    if chooses:
        told = _with_lists(told, blocks)
        attn_choose_kernel[blocks](
            *(rows(q), rows(k), *_bounds(problem.pages.bounds), bias, told),
            math.log(problem.tolerance / told.tile_keys.value),
            rounding_of_logits(q.shape[3]),
            BLOCK_N=min(_MOST_CHOICES, block_n),
            num_warps=4,
            num_stages=3,
            **options,
        )
    parts = _parts(blocks[0] * blocks[1], told.columns * page_size // block_n)
    acc = lse.new_empty((parts, *o.shape))
    m, l = lse.new_empty((2, parts, *lse.shape))
    attn_decode_kernel[(*blocks, parts)](
        *map(rows, (q, k, v)),
        *(acc, m, l, bias, told),
        BLOCK_N=block_n,
        BLOCK_DV=block_dv,
        num_warps=8 if single else 4,
        num_stages=1 if single else 2,
        **options,
    )
    attn_decode_merge_kernel[(lse.numel(),)](
        *(acc, m, l, rows(o), rows(lse), told, parts),
        PARTS=triton.next_power_of_2(parts),
        BLOCK_DV=block_dv,
        **SUMS_OVER_LANES,
    )
    return o, lse


@on_its_device
def append(pages: Tensor, x: Tensor, block_table: Tensor, lengths: Tensor) -> None:
    """Writes x (B, heads, n, channels or nothing) into pages, as the last of `lengths` keys."""
    batch, heads, tokens = x.shape[:3]
    channels = x.shape[3] if x.dim() == 4 else 1
    attn_append_kernel[(batch * heads * triton.cdiv(tokens, _TOKENS),)](
        *(rows(pages), rows(x), block_table, lengths, block_table.shape[1], pages.shape[2]),
        *(heads, tokens, channels),
        TOKENS=_TOKENS,
        CHANNELS=triton.next_power_of_2(channels),
        **OPTIONS,
    )


def _told(problem: calls.Problem) -> Pages:
    """What the kernels are told of a problem with pages."""
    q, v, pages, window = problem.q, problem.v, problem.pages, problem.geometry.window
    (batch, heads, n_query, head_dim), (_, kv_heads, page_size, value_dim) = q.shape, v.shape
    tile_keys = page_size // pages.bounds.centres.shape[2]
    return Pages(
        *(batch, heads, kv_heads, heads // kv_heads, n_query),
        _ENDLESS if window is None else window,
        problem.scale * LOG2E.value,
        *(pages.block_table, pages.block_table.shape[1], page_size, pages.lengths),
        *map(constexpr, (head_dim, value_dim, tile_keys)),
    )


def _with_lists(problem: Pages, blocks: tuple[int, int]) -> Pages:
    """With room for the tiles that each block of queries takes."""
    # In a full ring the oldest tile may stand where the newest does.
    most = problem.columns * problem.page_size // problem.tile_keys.value + 1
    lists = problem.block_table.new_empty((math.prod(blocks), most))
    return problem._replace(most_tiles=most, lists=lists, counts=lists.new_empty(len(lists)))


def _bounds(bounds: calls.Bounds) -> list[Rows | None]:
    """Centres and extents of tiles, lowest and highest sums, or a table's peaks as the highest."""
    centres, extents, lowest, highest = bounds
    if lowest is None and highest is not None:
        return [rows(centres), rows(extents), None, per_head(highest)]
    return [None if x is None else rows(x) for x in bounds]


def _parts(programs: int, tiles: int) -> int:
    """How many parts the keys of a sequence are cut into; their length need not be known here."""
    wanted = triton.cdiv(_PROGRAMS, programs)
    return max(1, min(wanted, tiles // _LEAST_TILES, _MOST_PARTS))
