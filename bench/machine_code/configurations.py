"""Searches the sizes of blocks that triton_kernels/configs/ lists, for an H100 (90) or A100 (80).

    python -m bench.machine_code.configurations 90 [64 128 256]

For each head_dim and kernel, and for the problems that share a configuration now, it prints the
best configuration with which no loop moves registers to memory. Kernels are compiled, not run: the
search compares the estimated cycles per pair of query and key on a multiprocessor, in the loop over
whole tiles (bench/estimates). bench/results/estimates-sm_90.md states the error of the estimates.
"""

from __future__ import annotations

import itertools
import math
import sys
from typing import NamedTuple

import torch
from biased_flash_attn.triton_kernels import configs
from biased_flash_attn.triton_kernels.configs import Config
from triton.compiler.errors import CompilationError
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from bench.estimates import kernels, times
from bench.estimates.gpu import GPUS
from bench.estimates.kernels import choosing
from bench.machine_code import compiled

KERNELS = {
    "forward": "attn_fwd_kernel",
    "backward_queries": "attn_bwd_dq_kernel",
    "backward_keys": "attn_bwd_dkv_kernel",
    "backward_table": "attn_bwd_table_kernel",
}


class Problem(NamedTuple):
    """A problem of `compiled`. trained: whether the gradients of the bias are computed."""

    form: str
    dtype: torch.dtype
    trained: bool


def tiles(kernel: str, width: int) -> list[tuple[int, int, int]]:
    """Queries, keys and warps, large tiles first, with fewer pairs per thread for wider heads."""
    sizes = (128, 64, 32, 16) if width <= 128 else (64, 32, 16)
    most = min(64, 64 * 128 // width)
    found = itertools.product(sizes, sizes, (8, 4))
    square = kernel == "backward_table"
    fitting = [x for x in found if 8 <= pairs(*x) <= most and (x[0] == x[1] or not square)]
    return sorted(fitting, key=lambda x: pairs(*x), reverse=True)


def pairs(queries: int, keys: int, warps: int) -> int:
    """The number of pairs that each thread computes."""
    return queries * keys // (32 * warps)


def served(kernel: str, width: int) -> dict[Config, list[Problem]]:
    """The configurations that ship for a kernel, and the problems that use each of them."""
    found, shipped, chosen = {}, configs.choose, {}

    def choose(name, *rest):
        chosen.setdefault(name, shipped(name, *rest))
        return chosen[name]

    with choosing(choose):
        for form, dtype, trained, names in compiled.problems():
            chosen.clear()
            list(compiled.compiled(form, dtype, width, trained, ()))
            if kernel in chosen and (names is None or KERNELS[kernel] in names):
                found.setdefault(chosen[kernel], []).append(Problem(form, dtype, trained))
    return found


def search(
    arch: int, kernel: str, width: int, ahead: bool, problems: list[Problem]
) -> tuple[float, Config | None]:
    """The configuration whose worst problem takes the fewest cycles.

    A tile that spills with one stage is taken to spill with more. The search ends after five
    consecutive tiles without an improvement, as the following ones are smaller.
    """
    best, no_better = (math.inf, None), 0
    for tile in tiles(kernel, width):
        no_better += best[1] is not None
        for stages in (1, 2, 3):
            config = Config(*tile, stages, ahead)
            found = worst(arch, kernel, width, config, problems, best[0])
            # Smaller tiles must save a tenth, because the cycles are estimates.
            if found < (best[0] if best[1] is None else 0.9 * best[0]):
                best, no_better = (found, config), 0
            if found == math.inf:
                break
        if no_better == 5:
            break
    return best


def worst(
    arch: int, kernel: str, width: int, config: Config, problems: list[Problem], enough: float
) -> float:
    """The cycles of the slowest problem, infinite if one does not compile or spills.

    It stops at the first problem above `enough`, which is then tried first in the next call.
    """
    most = 0.0
    for problem in tuple(problems):
        try:
            most = max(most, cycles(arch, kernel, width, config, problem))
        except (CompilationError, OutOfResources, RuntimeError):
            most = math.inf
        if most > enough or most == math.inf:
            problems.remove(problem)
            problems.insert(0, problem)
            break
    return most


def cycles(arch: int, kernel: str, width: int, config: Config, problem: Problem) -> float:
    """The cycles per pair, infinite if a loop moves registers to memory or shared memory does not
    suffice."""
    form, dtype, trained = problem
    choice = {"trained": trained, "dtype": dtype, "config": config}
    built = kernels.build(arch, KERNELS[kernel], form, width, **choice)
    blocks = built.blocks_at_once(GPUS[arch])
    if built.stores or not blocks:
        return math.inf
    simulated, _ = times.whole_tiles(built, GPUS[arch])
    return simulated / (blocks * built.block_m * built.block_n)


def main(arch: str, *widths: str) -> None:
    driver.set_active(compiled.Processor(int(arch)))
    for width, kernel in itertools.product(map(int, widths), KERNELS):
        for shipped, problems in served(kernel, width).items():
            found, config = search(int(arch), kernel, width, shipped.ahead, problems)
            print(f"{width} {kernel}, {len(problems)} problems: {shipped}", flush=True)
            print(f"    {found:.3f} {config}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *(sys.argv[2:] or map(str, compiled.WIDTHS)))
