"""The time of a CUDA kernel, from the cycles of its tiles and the assignment of blocks."""

from __future__ import annotations

from dataclasses import dataclass

from ..gpu import PARTITIONS, Gpu
from ..pipes import PIPES
from ..times import Problem, last_end
from .kernels import DKV, ELEMENT_BYTES, Kernel, cycles

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
    if kernel.name == DKV:
        return [every - first // block_n for first in blocks]
    return [-(-min(first + block_m, n) // block_n) for first in reversed(blocks)]


def milliseconds(kernel: Kernel, gpu: Gpu, problem: Problem) -> float:
    of_blocks = tiles_of_blocks(kernel, problem)
    return of_tiles(kernel, gpu, of_blocks, problem.batch * problem.heads, problem.causal)


def of_tiles(
    kernel: Kernel, gpu: Gpu, of_blocks: list[int], groups: int, causal: bool = True
) -> float:
    """The same for blocks with given numbers of tiles, in the order in which they start, for each
    of some groups."""
    once, of_block, of_tile = cycles(kernel, gpu)
    if causal:
        more = len(kernel.paths.masked) - len(kernel.paths.whole)
        of_block += kernel.block_m / kernel.block_n * more * kernel.warps / PARTITIONS
    blocks = [of_block + of_tile * tiles for tiles in of_blocks]
    return gpu.nanoseconds(once + last_end(blocks, groups, gpu.multiprocessors)) * 1e-6


def bound(kernel: Kernel, gpu: Gpu, problem: Problem) -> Bound:
    """What limits the kernel in a problem in which all blocks at once read tiles of each head."""
    units = dict(kernel.pipes(gpu))
    at_once = max(1.0, gpu.multiprocessors / (problem.batch * problem.heads))
    of_each = gpu.hbm / gpu.clock / gpu.multiprocessors
    units[HBM] = kernel.tile_bytes / at_once / of_each
    return Bound(cycles(kernel, gpu).tile, units)


def milliseconds_of_delta(gpu: Gpu, problem: Problem) -> float:
    """The kernel that reads o and its gradient, and is bound by memory."""
    rows = problem.batch * problem.heads * problem.n
    return 2 * ELEMENT_BYTES * rows * problem.head_dim / gpu.hbm * 1e-6
