"""The time of a kernel, from the cycles of its loops and the assignment of blocks."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from functools import cache

from bench.machine_code.sass import Instruction

from . import tiles
from .gpu import Gpu
from .kernels import Kernel
from .pipes import PIPES, WARPS_OF_A_GROUP, multiply_adds, pipe_cycles
from .simulate import cycles_of_a_pass, prepare, simulate

FLOPS = 4  # of a forward pass, per pair of query and key and per channel
# The matrix products of each kernel, which take head_dim multiply-adds per pair.
PRODUCTS = {tiles.FORWARD: 2, tiles.DQ: 3, tiles.DKV: 4, tiles.TABLE: 2}
BACKWARD = 2.5  # flops of the backward pass for each of the forward pass, by convention


@dataclass(frozen=True)
class Problem:
    batch: int
    heads: int
    n: int
    head_dim: int
    causal: bool = True

    @property
    def flops(self) -> float:
        """The FLOPs of the forward pass, with half of all pairs if attention is causal."""
        pairs = self.n**2 / (2 if self.causal else 1)
        return FLOPS * self.batch * self.heads * pairs * self.head_dim


@dataclass(frozen=True)
class Cycles:
    """The cycles of one multiprocessor that runs `blocks` blocks at once."""

    blocks: int
    of_passes: tuple[float, ...]  # per iteration of each loop, for all blocks
    around: float  # before, between and after the loops


@dataclass(frozen=True)
class Estimate:
    milliseconds: float
    bound_by_memory: bool  # whether reading and writing every tensor once takes as long


@cache
def cycles(kernel: Kernel, gpu: Gpu, blocks: int) -> Cycles:
    steps = [prepare(one, gpu, kernel.conflicts) for one in kernel.code.instructions]
    of_passes = tuple(
        cycles_of_a_pass(steps[loop.begin : loop.end], kernel.warps, blocks)
        for loop in kernel.code.loops
    )
    exits = (at for at, one in enumerate(kernel.code.instructions) if one.name == "EXIT")
    once = simulate(steps[: max(exits) + 1], kernel.warps, blocks)
    return Cycles(blocks, of_passes, max(0.0, once - sum(of_passes)))


def estimate(kernel: Kernel, gpu: Gpu, problem: Problem, longest_first: bool = True) -> Estimate:
    """The time of a kernel. longest_first: whether blocks with most tiles start first, as ours."""
    passes = tiles.passes(kernel.name, _tiling(kernel, problem.n))
    groups = problem.batch * problem.heads
    at_once = kernel.blocks_at_once(gpu)
    if not at_once:
        raise ValueError(f"{kernel} takes more registers or shared memory than {gpu.name} has")
    at_once = min(at_once, -(-groups * len(passes) // gpu.multiprocessors))
    found = cycles(kernel, gpu, at_once)
    of_blocks = [
        found.around + sum(n * each for n, each in zip(counts, found.of_passes, strict=True))
        for counts in passes
    ]
    if not longest_first:
        of_blocks.reverse()
    busy = gpu.nanoseconds(last_end(of_blocks, groups, gpu.multiprocessors * at_once))
    memory = _bytes(kernel.name, problem) / gpu.hbm
    return Estimate(max(busy, memory) * 1e-6, memory >= busy)


def whole_tiles(kernel: Kernel, gpu: Gpu) -> tuple[float, Counter[str]]:
    """The cycles of a multiprocessor and of each of its units, for one iteration of the loop over
    whole tiles in all of its blocks."""
    body, blocks = whole_loop(kernel), kernel.blocks_at_once(gpu)
    steps = [prepare(one, gpu, kernel.conflicts) for one in body]
    simulated = cycles_of_a_pass(steps, kernel.warps, blocks)
    return simulated, pipe_cycles(body, kernel.warps * blocks, gpu, kernel.conflicts)


def whole_loop(kernel: Kernel) -> tuple[Instruction, ...]:
    """The loop over unmasked tiles, which has the fewest instructions per exponential; each pair of
    query and key takes one exponential."""
    exponentials = {
        loop: sum(one.opcode.startswith("MUFU.EX2") for one in kernel.code.body(loop))
        for loop in kernel.code.loops
    }
    loops = (loop for loop, found in exponentials.items() if found)
    return kernel.code.body(min(loops, key=lambda x: (x.end - x.begin) / exponentials[x]))


def repeated_products(kernel: Kernel) -> float:
    """The multiply-adds of an iteration relative to those of the formula, above 1 if the
    products include a bias, or if a tile has too few rows for all warps."""
    found = sum(
        multiply_adds(one) * kernel.warps / (WARPS_OF_A_GROUP if one.name == "HGMMA" else 1)
        for one in whole_loop(kernel)
        if one.name in ("HGMMA", "HMMA")
    )
    return found / (PRODUCTS[kernel.name] * kernel.block_m * kernel.block_n * kernel.head_dim)


def critical(of_units: Counter[str]) -> str:
    return max(PIPES, key=lambda pipe: of_units[pipe])


def _tiling(kernel: Kernel, n: int) -> tiles.Tiling:
    return tiles.tiling(kernel.form, kernel.causal, n, kernel.block_m, kernel.block_n)


def last_end(of_blocks: list[float], groups: int, places: int) -> float:
    """The end of the last block, if each place starts the next block as soon as it is free."""
    free = [0.0] * places
    for block in of_blocks:
        for _ in range(groups):
            heapq.heapreplace(free, free[0] + block)
    return max(free)


def _bytes(kernel: str, problem: Problem) -> float:
    """The bytes of all (batch, heads, n, head_dim) tensors that a kernel reads and writes."""
    tensors = {tiles.FORWARD: 4, tiles.DQ: 5, tiles.DKV: 6, tiles.DELTA: 2, tiles.TABLE: 4}
    return 2 * tensors[kernel] * problem.batch * problem.heads * problem.n * problem.head_dim
