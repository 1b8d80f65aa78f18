"""Searches the sizes of blocks that triton_kernels/configs.py lists, for one processor.

    python bench/configurations.py 90 [64 128 256]

Takes the problems that share a configuration now, for each width of a head and kernel, and prints
the best one with which none of them spills registers. They are compiled, not run: what is compared
is an estimate of cycles a pair of query and key takes on a multiprocessor, from the instructions of
the loop over whole tiles, its products, exponentials and loads, and how well latency is hidden.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from biased_flash_attn.triton_kernels import configs
from biased_flash_attn.triton_kernels.configs import Config
from triton.compiler.errors import CompilationError
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

import compiled

KERNELS = {
    "forward": "attn_fwd_kernel",
    "backward_queries": "attn_bwd_dq_kernel",
    "backward_keys": "attn_bwd_dkv_kernel",
    "backward_table": "attn_bwd_table_kernel",
}
# Matrix products of a kernel, each of as many multiplications a pair as a head is wide.
PRODUCTS = {"forward": 2, "backward_queries": 3, "backward_keys": 4, "backward_table": 2}
REGISTERS, THREADS, ISSUES, EXPONENTIALS = 65536, 2048, 4, 16  # of a multiprocessor, or a cycle
LOAD_CYCLES, STEP_CYCLES = 800, 300  # a load from memory that nothing hides; dependent steps


class Problem(NamedTuple):
    """As `compiled` names it; trained: whether gradients of the bias are computed."""

    form: str
    dtype: torch.dtype
    trained: bool


@dataclass(frozen=True)
class Multiprocessor:
    """What it does in a cycle, and what it has."""

    multiplications: int  # of matrix units
    bytes: int  # from the second cache, about
    shared: int  # bytes


MULTIPROCESSORS = {
    80: Multiprocessor(1024, 32, 163 * 1024),
    90: Multiprocessor(2048, 24, 227 * 1024),
    100: Multiprocessor(4096, 24, 227 * 1024),
}


def tiles(kernel: str, width: int) -> list[tuple[int, int, int]]:
    """Queries, keys and warps, large tiles first; fewer pairs a thread the wider a head is."""
    sizes = (128, 64, 32, 16) if width <= 128 else (64, 32, 16)
    most = min(64, 64 * 128 // width)
    found = itertools.product(sizes, sizes, (8, 4))
    square = kernel == "backward_table"
    fitting = [x for x in found if 8 <= pairs(*x) <= most and (x[0] == x[1] or not square)]
    return sorted(fitting, key=lambda x: pairs(*x), reverse=True)


def pairs(queries: int, keys: int, warps: int) -> int:
    """Those of a thread."""
    return queries * keys // (32 * warps)


def cycles(arch: int, kernel: str, width: int, config: Config, one: compiled.Compiled) -> float:
    """Estimated for a pair."""
    processor, tile = MULTIPROCESSORS[arch], config.block_m * config.block_n
    blocks = min(
        REGISTERS // (one.registers * 32 * config.num_warps),
        processor.shared // (one.shared + 1024),
        THREADS // (32 * config.num_warps),
    )
    # Rows of half precision that are loaded for a tile.
    rows = {"backward_keys": 2 * config.block_m, "backward_table": 4 * config.block_m}
    loads = rows.get(kernel, 2 * config.block_n) * 2 * width / processor.bytes
    issue = one.instructions * tile / 32 / ISSUES
    products = PRODUCTS[kernel] * tile * width / processor.multiplications
    # Groups of four warps work beside each other, but for loads they wait for together.
    work = (issue + products) / (config.num_warps / 4)
    unhidden = LOAD_CYCLES * (config.num_stages == 1) + STEP_CYCLES + work
    return max(issue, products, loads, tile / EXPONENTIALS, unhidden / blocks) / tile


@contextmanager
def choosing(choose: Callable) -> Iterator[None]:
    """With another function instead of configs.choose."""
    shipped, configs.choose = configs.choose, choose
    try:
        yield
    finally:
        configs.choose = shipped


def served(kernel: str, width: int) -> dict[Config, list[Problem]]:
    """The configurations of a kernel that ship, each with its problems."""
    found, shipped, chosen = {}, configs.choose, {}

    def choose(name, *rest):
        chosen.setdefault(name, shipped(name, *rest))
        return chosen[name]

    with choosing(choose):
        for form, dtype, trained, kernels in compiled.problems():
            chosen.clear()
            list(compiled.compiled(form, dtype, width, trained, ()))
            if kernel in chosen and (kernels is None or KERNELS[kernel] in kernels):
                found.setdefault(chosen[kernel], []).append(Problem(form, dtype, trained))
    return found


def search(
    arch: int, kernel: str, width: int, ahead: bool, problems: list[Problem]
) -> tuple[float, Config | None]:
    """The configuration whose worst problem takes the fewest cycles.

    What spills in one stage spills in two. Five tiles in a row that are no better end the search,
    as those that follow are smaller.
    """
    best, no_better = (math.inf, None), 0
    for tile in tiles(kernel, width):
        no_better += best[1] is not None
        for stages in (1, 2):
            config = Config(*tile, stages, ahead)
            found = worst(arch, kernel, width, config, problems, best[0])
            # An estimate is not worth smaller tiles for less than a tenth.
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
    """Cycles, infinite where a problem does not compile or spills; more than `enough` is any more.

    The problem that decided comes first next time.
    """
    shipped, most = configs.choose, 0.0

    def choose(name, *rest):
        return config if name == kernel else shipped(name, *rest)

    with choosing(choose):
        for problem in tuple(problems):
            try:
                most = max(most, measured(arch, kernel, width, config, problem))
            except (CompilationError, OutOfResources, RuntimeError):
                most = math.inf
            if most > enough or most == math.inf:
                problems.remove(problem)
                problems.insert(0, problem)
                break
    return most


def measured(arch: int, kernel: str, width: int, config: Config, problem: Problem) -> float:
    """Cycles, infinite where registers spill or memory does not suffice."""
    form, dtype, trained = problem
    (one,) = compiled.compiled(form, dtype, width, trained, (KERNELS[kernel],))
    if one.spills or one.shared > MULTIPROCESSORS[arch].shared:
        return math.inf
    return cycles(arch, kernel, width, config, one)


def main(arch: str, *widths: str) -> None:
    driver.set_active(compiled.Processor(int(arch)))
    for width, kernel in itertools.product(map(int, widths), KERNELS):
        for shipped, problems in served(kernel, width).items():
            found, config = search(int(arch), kernel, width, shipped.ahead, problems)
            print(f"{width} {kernel}, {len(problems)} problems: {shipped}", flush=True)
            print(f"    {found:.3f} {config}", flush=True)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main(sys.argv[1], *(sys.argv[2:] or map(str, compiled.WIDTHS)))
