"""The number of iterations of each loop of a kernel: the tiles of a block of queries or of keys.

The kernels process tiles in parts, with a separate loop for each and in a fixed order
(tile_ranges.py of the kernels): masked tiles, factored ones, whose bias is part of a matrix
product or, beyond the band of a relative bias, 0, and others. This module computes the same parts
on the host, for all blocks of problems without windows, plans and packed sequences, and with equal
numbers of queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.machine_code.compiled import VECTORS

FORWARD, DQ, DKV = "attn_fwd_kernel", "attn_bwd_dq_kernel", "attn_bwd_dkv_kernel"
DELTA, TABLE = "attn_bwd_delta_kernel", "attn_bwd_table_kernel"
RELATIVE = "attn_bwd_relative_kernel"
DECODE, MERGE = "attn_decode_kernel", "attn_decode_merge_kernel"
HAVE_FACTORS = ("linear", "distance", "cumulative", "cumulative-gain")
# The distance from which polynomials are assumed to fit a table; T5's buckets are constant there.
FAR = 128
*_, BAND = VECTORS["relative"]


@dataclass(frozen=True)
class Tiling:
    """A problem of n queries and n keys, and the blocks of a kernel.

    has_factors: whether the bias of distant tiles is part of a matrix product. far: the smallest
    such distance of a table, or the one from which a relative bias is 0; None for other forms.
    distances: those that gradients of tables are summed for.
    """

    n: int
    block_m: int
    block_n: int
    causal: bool
    has_factors: bool
    far: int | None
    distances: range

    @property
    def factored(self) -> bool:
        return self.has_factors or self.far is not None


def tiling(form: str, causal: bool, n: int, block_m: int, block_n: int) -> Tiling:
    first, last, far = 0 if causal else 1 - n, n - 1, None
    if form == "distance":
        far = FAR
    elif form == "relative":
        far = BAND if causal else BAND // 2
        first, last = max(first, -far), min(last, far - 1)
    distances = range(first, last + 1)
    return Tiling(n, block_m, block_n, causal, form in HAVE_FACTORS, far, distances)


def passes(kernel: str, tiles: Tiling) -> list[list[int]]:
    """The iterations of each loop for each block, in the order in which blocks start."""
    if kernel == DELTA:
        return [[]] * _ceil(tiles.n, tiles.block_m)
    if kernel in (TABLE, RELATIVE):
        blocks = _ceil(tiles.n, tiles.block_m)
        before, last = tiles.distances[0] - 1, tiles.distances[-1] - 1
        diagonals = range(before // tiles.block_m, last // tiles.block_m + 2)
        return [[max(0, blocks - abs(diagonal))] for diagonal in diagonals]
    if kernel == DKV:
        of_block, step, size = _query_tiles, tiles.block_m, tiles.block_n
    else:
        of_block, step, size = _key_tiles, tiles.block_n, tiles.block_m
    found = []
    for first in range(0, tiles.n, size):
        parts = of_block(tiles, first)
        half = max(step // 2, 16) if tiles.has_factors else step
        found.append([_ceil(end - begin, step if far else half) for begin, end, far in parts])
    return found if kernel == DKV else found[::-1]


def _key_tiles(tiles: Tiling, first: int) -> list[tuple[int, int, bool]]:
    """The parts of the keys for the block of queries from `first`: begin, end, and whether the part
    is factored."""
    size, distance = tiles.block_n, tiles.far or 0
    end, whole_end = tiles.n, tiles.n // size * size
    if tiles.causal:
        end = min(first + tiles.block_m, tiles.n)
        whole_end = min(whole_end, (first + 1) // size * size)
    if not tiles.factored:
        return [(0, whole_end, False), (whole_end, end, False)]
    past = min(whole_end, max(first - distance + 1, 0) // size * size)
    future = whole_end
    if not tiles.causal:
        future = min(whole_end, _ceil(first + tiles.block_m + distance, size) * size)
    future = max(future, past)
    parts = [(0, past, True)]
    if tiles.far is not None or not tiles.causal:
        parts.append((past, future, False))
    if not tiles.causal:
        parts.append((future, whole_end, True))
    return [*parts, (max(whole_end, future), end, False)]


def _query_tiles(tiles: Tiling, first: int) -> list[tuple[int, int, bool]]:
    """The parts of the queries for the block of keys from `first`; see _key_tiles."""
    size, distance = tiles.block_m, tiles.far or 0
    last = min(first + tiles.block_n, tiles.n) - 1
    whole_end = tiles.n // size * size if first + tiles.block_n <= tiles.n else 0
    begin, near = (first // size * size, _ceil(last, size) * size) if tiles.causal else (0, 0)
    if not tiles.factored:
        near = min(near, tiles.n)
        past = max(whole_end, near)
        masked = [(begin, near, False)] if tiles.causal else []
        return [*masked, (near, past, False), (past, tiles.n, False)]
    past = _ceil(last + distance, size) * size
    before = begin
    if not tiles.causal:
        before = min(whole_end, max(first - distance, 0) // size * size)
    if tiles.far is None:
        near = past
    near = max(min(near, tiles.n), before)
    past = max(min(past, whole_end), near)
    parts = [] if tiles.causal else [(begin, before, True)]
    if tiles.causal or tiles.far is None:
        parts.append((before, near, False))
    if tiles.far is not None:
        parts.append((near, past, False))
    return [*parts, (past, max(whole_end, past), True), (max(whole_end, past), tiles.n, False)]


def _ceil(x: int, size: int) -> int:
    return -(-max(x, 0) // size)
