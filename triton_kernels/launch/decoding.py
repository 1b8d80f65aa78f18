"""Launches the decoding kernels: selection of tiles, attention over parts of the keys, and
merge."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from ... import problem as calls
from ...shared_constants import rounding_of_logits
from ..decode.append import attn_append_kernel
from ..decode.attention import attn_decode_kernel, attn_decode_merge_kernel
from ..decode.selection import attn_choose_kernel
from ..forms import kernels_of
from ..operands import strided
from ..primitives import LOG2E
from .options import OPTIONS, SUMS_OVER_LANES, on_its_device

_MAX_KEYS, _TILE_BYTES = 64, 2**14  # limits of a tile, set by the number of registers
_TILES_AT_ONCE = 32  # tiles that the selection examines at a time
_MIN_ROWS, _MAX_ROWS = 16, 64  # the minimum of matrix units; the maximum of a block
_MIN_TILES = 4  # tiles per part at least, which amortizes merging it
# Programs that fill a GPU: two on each multiprocessor of a large one.
_PROGRAMS = 256
_MAX_PARTS = 64
_UNBOUNDED = 2**30  # a window longer than any sequence
_TOKENS = 16  # tokens per program that appends


class Pages(NamedTuple):
    """The arguments of the decoding kernels: sizes, and the location of the keys (see
    BlockTable)."""

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
    # lists: the tiles (of tile_keys keys) that each block of queries attends to, at most max_tiles,
    # and counts their number; None if it attends to all.
    tile_keys: tl.constexpr
    max_tiles: int = 0
    lists: Tensor | None = None
    counts: Tensor | None = None


@on_its_device
def decode(problem: calls.Problem) -> tuple[Tensor, Tensor]:
    """Returns o (B, H, Nq, Dv) in q's dtype and lse (B, H, Nq) in float32."""
    q, k, v = problem.q, problem.k, problem.v
    o, lse = problem.empty_results()
    kernels, paged = kernels_of(problem), _pages_of(problem)
    bias = kernels.bias_of_pages(problem.form.tensors)
    single = q.dtype == torch.float32
    chooses = problem.tolerance > 0 and problem.form.may_skip
    page_size, rows_of_group = paged.page_size, paged.group * paged.n_query
    block_d, block_dv = (max(16, triton.next_power_of_2(x.shape[3])) for x in (q, v))
    # Products in float32 do not fit in registers together with the bounds of a function nor, if
    # heads are wide, with those of vectors of keys.
    has_large_bounds = bias.function or (bias.key_vectors is not None and block_d > 64)
    chooses = chooses and not (single and has_large_bounds)

    row_bytes = max(block_d, block_dv) * q.element_size()
    block_m, block_n = tile_sizes(rows_of_group, page_size, row_bytes)
    blocks = paged.batch * paged.kv_heads, triton.cdiv(rows_of_group, block_m)
    options = {"BLOCK_M": block_m, "BLOCK_D": block_d, **OPTIONS}
    if chooses:
        paged = _with_lists(paged, blocks)
        attn_choose_kernel[blocks](
            strided(q),
            strided(k),
            kernels.bounds_of_pages(problem.pages.bounds, bias),
            bias,
            paged,
            math.log(problem.tolerance / paged.tile_keys.value),
            rounding_of_logits(q.shape[3]),
            # The bounds of a function take registers for each tile.
            BLOCK_N=min(16 if bias.function else _TILES_AT_ONCE, block_n),
            num_warps=4,
            num_stages=3,
            **options,
        )
    parts = parts_of_sequence(blocks[0] * blocks[1], paged.columns * page_size // block_n)
    acc = lse.new_empty((parts, *o.shape))
    m, l = lse.new_empty((2, parts, *lse.shape))
    attn_decode_kernel[(*blocks, parts)](
        strided(q),
        strided(k),
        strided(v),
        acc,
        m,
        l,
        bias,
        paged,
        BLOCK_N=block_n,
        BLOCK_DV=block_dv,
        num_warps=8 if single else 4,
        num_stages=1 if single else 2,
        **options,
    )
    attn_decode_merge_kernel[(lse.numel(),)](
        acc,
        m,
        l,
        strided(o),
        strided(lse),
        paged,
        parts,
        PARTS=triton.next_power_of_2(parts),
        BLOCK_DV=block_dv,
        **SUMS_OVER_LANES,
    )
    return o, lse


@on_its_device
def append(pages: Tensor, x: Tensor, block_table: Tensor, lengths: Tensor) -> None:
    """Writes x (B, heads, n, channels) or (B, heads, n) to the last n of the lengths[b] keys of
    each sequence."""
    batch, heads, tokens = x.shape[:3]
    channels = x.shape[3] if x.dim() == 4 else 1
    attn_append_kernel[(batch * heads * triton.cdiv(tokens, _TOKENS),)](
        strided(pages),
        strided(x),
        block_table,
        lengths,
        block_table.shape[1],
        pages.shape[2],
        heads,
        tokens,
        channels,
        TOKENS=_TOKENS,
        CHANNELS=triton.next_power_of_2(channels),
        **OPTIONS,
    )


def _pages_of(problem: calls.Problem) -> Pages:
    """Returns the arguments of the kernels, without lists of tiles."""
    q, v, pages, window = problem.q, problem.v, problem.pages, problem.geometry.window
    (batch, heads, n_query, head_dim), (_, kv_heads, page_size, value_dim) = q.shape, v.shape
    tile_keys = page_size // pages.bounds.centres.shape[2]
    return Pages(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        n_query=n_query,
        window=_UNBOUNDED if window is None else window,
        scale_in_base_2=problem.scale * LOG2E.value,
        block_table=pages.block_table,
        columns=pages.block_table.shape[1],
        page_size=page_size,
        lengths=pages.lengths,
        head_dim=constexpr(head_dim),
        value_dim=constexpr(value_dim),
        tile_keys=constexpr(tile_keys),
    )


def _with_lists(problem: Pages, blocks: tuple[int, int]) -> Pages:
    """Returns the arguments with uninitialized lists of the tiles of each block of queries."""
    # In a full ring, the oldest and the newest tile may be in the same place.
    most = problem.columns * problem.page_size // problem.tile_keys.value + 1
    lists = problem.block_table.new_empty((math.prod(blocks), most))
    return problem._replace(max_tiles=most, lists=lists, counts=lists.new_empty(len(lists)))


def tile_sizes(rows: int, page_size: int, row_bytes: int) -> tuple[int, int]:
    """Returns the numbers of rows and of keys of a tile. rows: those that share a key head.
    row_bytes: the bytes of a padded row of keys or values."""
    block_m = min(_MAX_ROWS, max(_MIN_ROWS, triton.next_power_of_2(rows)))
    return block_m, min(_MAX_KEYS, page_size, max(16, _TILE_BYTES // row_bytes))


def parts_of_sequence(programs: int, tiles: int) -> int:
    """Returns the number of parts of each sequence, whose keys have at most `tiles` tiles. It does
    not depend on the lengths, which are on the device. programs: those of each part."""
    wanted = triton.cdiv(_PROGRAMS, programs)
    return max(1, min(wanted, tiles // _MIN_TILES, _MAX_PARTS))
