"""The time of a kernel, from the cycles of its loops and the assignment of blocks."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from operator import itemgetter

from bench.machine_code.sass import Instruction

from . import tiles
from .gpu import Gpu
from .iteration import iteration
from .kernels import Kernel
from .pipes import PIPES, WARPS_OF_A_GROUP, multiply_adds, pipe_cycles
from .simulate import Step, cycles_of_a_pass, prepare, simulate

FLOPS = 4  # of a forward pass, per pair of query and key and per channel
# The matrix products of each kernel, which take head_dim multiply-adds per pair.
PRODUCTS = {tiles.FORWARD: 2, tiles.DQ: 3, tiles.DKV: 4, tiles.TABLE: 2, tiles.RELATIVE: 2}
# The (batch, heads, n, head_dim) tensors that each kernel reads and writes.
TENSORS = {
    tiles.FORWARD: 4,
    tiles.DQ: 5,
    tiles.DKV: 6,
    tiles.DELTA: 2,
    tiles.TABLE: 4,
    tiles.RELATIVE: 4,
}
# The (batch, heads, n, n) tensors among a dense bias and its gradient that they read and write.
PAIRS = {tiles.FORWARD: 1, tiles.DQ: 2, tiles.DKV: 1}
BYTES_OF_A_PAIR = 4
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
        return FLOPS * self.visible_pairs * self.head_dim

    @property
    def visible_pairs(self) -> float:
        return self.pairs / (2 if self.causal else 1)

    @property
    def pairs(self) -> int:
        return self.batch * self.heads * self.n**2


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
    code = kernel.code

    def steps(instructions: Iterable[Instruction]) -> list[Step]:
        return [prepare(one, gpu, kernel.conflicts) for one in instructions]

    of_passes, once, at = [], [], 0
    for loop in code.outer_loops:
        body = steps(iteration(code, loop, kernel.form))
        of_passes.append(cycles_of_a_pass(body, kernel.warps, blocks))
        once += [*steps(code.instructions[at : loop.begin]), *body]
        at = loop.end
    once += steps(code.instructions[at : code.end])
    around = simulate(once, kernel.warps, blocks) - sum(of_passes)
    return Cycles(blocks, tuple(of_passes), max(0.0, around))


def estimate(kernel: Kernel, gpu: Gpu, problem: Problem, longest_first: bool = True) -> Estimate:
    """The time of a kernel. longest_first: whether blocks with most tiles start first, as ours."""
    passes = tiles.passes(kernel.name, _tiling(kernel, problem.n))
    if not longest_first:
        passes = passes[::-1]
    busy = nanoseconds(kernel, gpu, passes, problem.batch * problem.heads)
    memory = _bytes(kernel, problem) / gpu.hbm
    return Estimate(max(busy, memory) * 1e-6, memory >= busy)


def nanoseconds(kernel: Kernel, gpu: Gpu, passes: list[list[int]], groups: int) -> float:
    """The time of blocks with these iterations of each loop, in each of the groups, if no memory
    outside the multiprocessors is slower than they are."""
    at_once = kernel.blocks_at_once(gpu)
    if not at_once:
        raise ValueError(f"{kernel} takes more registers or shared memory than {gpu.name} has")
    at_once = min(at_once, -(-groups * len(passes) // gpu.multiprocessors))
    found = cycles(kernel, gpu, at_once)
    of_blocks = [
        found.around + sum(n * each for n, each in zip(counts, found.of_passes, strict=True))
        for counts in passes
    ]
    return gpu.nanoseconds(last_end(of_blocks, groups, gpu.multiprocessors * at_once))


def clearing(form: str, gpu: Gpu, problem: Problem) -> float:
    """The milliseconds in which memory for the gradient of a dense bias is set to 0."""
    return BYTES_OF_A_PAIR * problem.pairs / gpu.hbm * 1e-6 if form == "dense" else 0.0


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
    bodies = [iteration(kernel.code, loop, kernel.form) for loop in kernel.code.outer_loops]
    exponentials = [sum(one.opcode.startswith("MUFU.EX2") for one in body) for body in bodies]
    found = [(len(body) / n, body) for body, n in zip(bodies, exponentials, strict=True) if n]
    return min(found, key=itemgetter(0))[1]


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


def _bytes(kernel: Kernel, problem: Problem) -> float:
    """The bytes of the large tensors that a kernel reads and writes, each once."""
    rows = problem.batch * problem.heads * problem.n
    found = 2 * TENSORS[kernel.name] * rows * problem.head_dim
    if kernel.form == "dense":
        found += BYTES_OF_A_PAIR * PAIRS.get(kernel.name, 0) * problem.visible_pairs
    return found
