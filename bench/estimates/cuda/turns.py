"""The schedule of blocks of keys that add to the sums of a tile of queries in the order of keys.

Blocks start in the order of keys, each on the multiprocessor that is free first, and compute their
tiles from the last queries on. One warp adds what the others have computed: to a tile after the
block of the keys before has released it. Shared memory has room for the sums of one tile, so the
others compute at most one more tile while that warp waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

# Nanoseconds from the turn of a block at a tile until its additions have been written to the L2
# cache, and from there until the next block sees that it has the turn: its warp polls. Both are
# guesses, a few round trips to the cache each.
WRITE, PASS = 1000.0, 500.0


@dataclass(frozen=True)
class Blocks:
    """Blocks that start one after another: those of the same keys, in some heads. tiles: those of
    queries that they visit, from the last one on."""

    heads: Sequence[int]
    tiles: range


@dataclass(frozen=True)
class Costs:
    """Cycles of a block besides its tiles, and of a tile; WRITE and PASS in cycles."""

    block: float
    tile: float
    write: float
    passing: float


def last_end(started: Sequence[Blocks], costs: Costs, multiprocessors: int) -> float:
    """The cycles until the last block has ended. started: blocks in the order of their start, in
    which those of a head have the order of keys."""
    free = np.zeros(multiprocessors)
    heads = 1 + max(max(blocks.heads) for blocks in started)
    # When each tile's sums can be added to: at any time, if no block has done so.
    turns = np.zeros((max(blocks.tiles.stop for blocks in started), heads))
    for blocks in started:
        rows = slice(blocks.tiles.start, blocks.tiles.stop)
        for some in _batches(blocks.heads, multiprocessors):
            places = np.argsort(free, kind="stable")[: len(some)]
            of_blocks = turns[rows, some]
            free[places] = _end(of_blocks[::-1], free[places] + costs.block, costs)
            turns[rows, some] = of_blocks
    return float(free.max())


def _batches(heads: Sequence[int], size: int) -> Iterable[list[int]]:
    return (list(heads[n : n + size]) for n in range(0, len(heads), size))


def _end(turns: np.ndarray, start: np.ndarray, costs: Costs) -> np.ndarray:
    """When blocks that start at some time have added to all tiles. turns: when they may, in the
    order of their visits; replaced by those of the next blocks."""
    computed = is_free = written = start  # is_free: the shared memory for sums
    for turn in turns:
        computed = np.maximum(computed + costs.tile, is_free)
        is_free = np.maximum(np.maximum(computed, turn), written)
        written = is_free + costs.write
        np.add(written, costs.passing, out=turn)
    return written
