"""What certified skipping saves: a training step with ALiBi, with the tiles that a plan keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from biased_flash_attn import attention_plan, backends, biases
from biased_flash_attn.shared_constants import PLAN_QUERIES

from ..report import CHANNELS
from ..times import Problem
from . import times
from .calibration import GPU
from .kernels import ALL, FORWARD, Kernel, build
from .turns import Blocks

LENGTH = 65536
HEAD_DIMS = (64, 128)
NAMES = (FORWARD, ALL)


@dataclass(frozen=True)
class Skipping:
    problem: Problem
    kept: float  # fraction of the tiles of the forward pass
    milliseconds: tuple[float, float]  # of all tiles, and of those that are kept

    @property
    def cells(self) -> tuple[str, ...]:
        every, kept = self.milliseconds
        sizes = str(self.problem.heads), str(self.problem.head_dim)
        return *sizes, f"{self.kept:.1%}", f"{every:.1f}", f"{kept:.1f}", f"{every / kept:.1f}x"


def estimates() -> list[Skipping]:
    return [_estimate(Problem(1, CHANNELS // width, LENGTH, width)) for width in HEAD_DIMS]


def _estimate(problem: Problem) -> Skipping:
    torch.manual_seed(0)
    shape = problem.batch, problem.heads, problem.n, problem.head_dim
    q, k = (torch.randn(shape, dtype=torch.bfloat16) for _ in range(2))
    with _untrimmed():
        first_key = attention_plan(q, k, biases.ALiBi(problem.heads), backend="cpu").first_key[0]
    every = kept = sum(times.milliseconds_around(name, GPU, problem) for name in NAMES)
    forward, of_keys = (build(name, "Linear", problem.head_dim) for name in NAMES)
    of_blocks = tiles_of_blocks(forward, first_key, problem.n)
    every += sum(times.milliseconds(one, GPU, problem) for one in (forward, of_keys))
    kept += times.of_tiles(forward, GPU, of_blocks, groups=1)
    kept += times.of_turns(of_keys, GPU, blocks_of_keys(of_keys, first_key, problem.n))
    all_tiles = times.tiles_of_blocks(forward, problem)
    fraction = sum(of_blocks) / (problem.heads * sum(all_tiles))
    return Skipping(problem, fraction, (every, kept))


@contextmanager
def _untrimmed() -> Iterator[None]:
    """Within the block, plans of the CPU kernels are those of the CUDA kernels."""
    cpu = backends.get("cpu")
    cpu.trim = backends.get("cuda").trim
    try:
        yield
    finally:
        del cpu.trim


def tiles_of_blocks(kernel: Kernel, first_key: Tensor, n: int) -> list[int]:
    """The tiles of each block of queries under a causal mask, in the order in which blocks start,
    for the first keys of each head and PLAN_QUERIES queries."""
    first = torch.arange(0, n, kernel.block_m)
    end = (first + kernel.block_m).clamp(max=n)
    keys = end - first_key[..., first // PLAN_QUERIES]
    return (-(-keys // kernel.block_n)).flatten().sort(descending=True).values.tolist()


def blocks_of_keys(kernel: Kernel, first_key: Tensor, n: int) -> list[Blocks]:
    """The blocks of keys in the order in which they start: those of a head in their order, each as
    early as the longest of those that follow (schedule.in_turn_for_keys)."""
    first = torch.arange(0, n, kernel.block_m)
    # The bounds do not decrease, so the queries of a key are those up to some tile of the plan.
    last = torch.searchsorted(
        first_key.long(), first.expand(len(first_key), -1) + kernel.block_m - 1, right=True
    )
    end = (last * PLAN_QUERIES).clamp(max=n)
    longest = (end - first).flip(1).cummax(1).values.flip(1)
    order = longest.T.flatten().argsort(descending=True, stable=True)
    begin_tile = first // kernel.block_n
    end_tile = -(-end // kernel.block_n)
    found = []
    for number in order.tolist():
        block, head = divmod(number, len(first_key))
        found.append(Blocks([head], range(int(begin_tile[block]), int(end_tile[head, block]))))
    return found
