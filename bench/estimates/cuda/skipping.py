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
from .kernels import DKV, DQ, FORWARD, Kernel, build

LENGTH = 65536
HEAD_DIMS = (64, 128)


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
    every = kept = times.milliseconds_of_delta(GPU, problem)
    for name in (FORWARD, DQ, DKV):
        kernel = build(name, "Linear", problem.head_dim)
        of_blocks = tiles_of_blocks(kernel, first_key, problem.n)
        every += times.milliseconds(kernel, GPU, problem)
        kept += times.of_tiles(kernel, GPU, of_blocks, groups=1)
        if name == FORWARD:
            all_tiles = times.tiles_of_blocks(kernel, problem)
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
    """The tiles of each block under a causal mask, in the order in which blocks start, for the
    first keys of each head and PLAN_QUERIES queries."""
    block_m, block_n = kernel.block_m, kernel.block_n
    first = torch.arange(0, n, block_m)
    if kernel.name != DKV:
        end = (first + block_m).clamp(max=n)
        keys = end - first_key[..., first // PLAN_QUERIES]
        return (-(-keys // block_n)).flatten().sort(descending=True).values.tolist()
    # The bounds do not decrease, so the queries of a key are those up to some tile.
    last = torch.searchsorted(
        first_key.long(), first.expand(len(first_key), -1) + block_m - 1, right=True
    )
    queries = (last * PLAN_QUERIES).clamp(max=n) - first
    return (-(-queries // block_n)).T.flatten().tolist()
