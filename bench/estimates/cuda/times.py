"""The time of a CUDA kernel, from the cycles of its tiles and the assignment of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..gpu import PARTITIONS, Gpu
from ..pipes import PIPES
from ..times import Problem, last_end
from . import turns
from .kernels import ALL, DQ, ELEMENT_BYTES, OF_KEYS, Kernel, cycles
from .turns import Blocks

SUM_BYTES = 4
HBM = "HBM"
UNITS = (*PIPES, HBM)


@dataclass(frozen=True)
class Bound:
    """What limits the loop over whole tiles: its cycles, and those of each unit."""

    cycles: float
    units: dict[str, float]

    @property
    def unit(self) -> str:
        return max(self.units, key=lambda unit: self.units[unit])

    @property
    def fraction(self) -> float:
        return self.units[self.unit] / self.cycles


def tiles_of_blocks(kernel: Kernel, problem: Problem) -> list[int]:
    """The tiles of each block, blocks with most tiles first."""
    n, block_m, block_n = problem.n, kernel.block_m, kernel.block_n
    every = -(-n // block_n)
    blocks = range(0, n, block_m)
    if not problem.causal:
        return [every] * len(blocks)
    if kernel.name in OF_KEYS:
        return [every - first // block_n for first in blocks]
    return [-(-min(first + block_m, n) // block_n) for first in reversed(blocks)]


def milliseconds(kernel: Kernel, gpu: Gpu, problem: Problem, in_turn: bool = True) -> float:
    """in_turn: whether blocks that add to the same sums do so in a fixed order, as ours."""
    of_blocks, groups = tiles_of_blocks(kernel, problem), problem.batch * problem.heads
    if kernel.name != ALL or not in_turn:
        return of_tiles(kernel, gpu, of_blocks, groups, problem.causal)
    every = max(of_blocks)
    started = [Blocks(range(groups), range(every - tiles, every)) for tiles in of_blocks]
    return of_turns(kernel, gpu, started, problem.causal)


def of_tiles(
    kernel: Kernel, gpu: Gpu, of_blocks: list[int], groups: int, causal: bool = True
) -> float:
    """The same for blocks with given numbers of tiles, in the order in which they start, for each
    of some groups."""
    once, _, of_tile = cycles(kernel, gpu)
    of_block = _of_block(kernel, gpu, causal)
    blocks = [of_block + of_tile * tiles for tiles in of_blocks]
    return gpu.nanoseconds(once + last_end(blocks, groups, gpu.multiprocessors)) * 1e-6


def of_turns(kernel: Kernel, gpu: Gpu, started: Sequence[Blocks], causal: bool = True) -> float:
    """The same for blocks that add in turn, in the order in which they start."""
    a_nanosecond = 1 / gpu.nanoseconds(1)
    costs = turns.Costs(
        _of_block(kernel, gpu, causal),
        cycles(kernel, gpu).tile,
        turns.WRITE * a_nanosecond,
        turns.PASS * a_nanosecond,
    )
    return gpu.nanoseconds(turns.last_end(started, costs, gpu.multiprocessors)) * 1e-6


def _of_block(kernel: Kernel, gpu: Gpu, causal: bool) -> float:
    """The cycles of a block besides those of whole tiles."""
    found = cycles(kernel, gpu).block
    if causal:
        more = len(kernel.paths.masked) - len(kernel.paths.whole)
        found += kernel.block_m / kernel.block_n * more * kernel.warps / PARTITIONS
    return found


def bound(kernel: Kernel, gpu: Gpu, problem: Problem) -> Bound:
    """What limits the kernel in a problem in which all blocks at once read tiles of each head."""
    units = dict(kernel.pipes(gpu))
    at_once = max(1.0, gpu.multiprocessors / (problem.batch * problem.heads))
    of_each = gpu.hbm / gpu.clock / gpu.multiprocessors
    moved = kernel.tile_bytes + 2 * kernel.sums_bytes  # sums are read and written
    units[HBM] = moved / at_once / of_each
    return Bound(cycles(kernel, gpu).tile, units)


def milliseconds_around(name: str, gpu: Gpu, problem: Problem) -> float:
    """The kernels before and after one of the backward pass, which are bound by memory."""
    elements = problem.batch * problem.heads * problem.n * problem.head_dim
    # Before all of them, o and its gradient are read. After ALL, sums become dq.
    moved = {DQ: 2 * ELEMENT_BYTES, ALL: 3 * ELEMENT_BYTES + SUM_BYTES}.get(name, 0)
    return moved * elements / gpu.hbm * 1e-6
