"""Searches the sizes of blocks that triton_kernels/configs.py lists, for one processor.

    python bench/configurations.py 90 [64 128 256]

Prints, for each width of a head, kernel and kind of bias, the configurations that no form of the
kind spills registers with, best first. They are compiled, not run: what is compared is an estimate
of cycles a pair of query and key takes on a multiprocessor, from the instructions of the loop over
whole tiles, the products and exponentials in a tile, and how well latency is hidden.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
import sys
from dataclasses import dataclass

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
# Those of a kind that need most registers.
FORMS = {False: ("distance", "cumulative"), True: ("log1p_square-gain", "cumulative-gain")}
REGISTERS, THREADS, ISSUES, EXPONENTIALS = 65536, 2048, 4, 16  # of a multiprocessor, or a cycle
LOAD_CYCLES, STEP_CYCLES = 800, 300  # a load from memory that nothing hides; dependent steps


@dataclass(frozen=True)
class Multiprocessor:
    """Multiplications of matrix units a cycle, and bytes of shared memory."""

    multiplications: int
    shared: int


MULTIPROCESSORS = {
    80: Multiprocessor(1024, 163 * 1024),
    90: Multiprocessor(2048, 227 * 1024),
    100: Multiprocessor(4096, 227 * 1024),
}


def candidates(kernel: str) -> list[Config]:
    """Large tiles first."""
    sizes = (128, 64, 32, 16)
    found = (Config(*c) for c in itertools.product(sizes, sizes, (8, 4), (2, 1)))
    square = kernel == "backward_table"
    fitting = [c for c in found if 8 <= pairs(c) <= 64 and (c.block_m == c.block_n or not square)]
    return sorted(fitting, key=pairs, reverse=True)


def pairs(config: Config) -> int:
    """Those of a thread."""
    return config.block_m * config.block_n // (32 * config.num_warps)


def cycles(arch: int, kernel: str, width: int, config: Config, one: compiled.Compiled) -> float:
    """Estimated for a pair."""
    processor, tile = MULTIPROCESSORS[arch], config.block_m * config.block_n
    blocks = min(
        REGISTERS // (one.registers * 32 * config.num_warps),
        processor.shared // (one.shared + 1024),
        THREADS // (32 * config.num_warps),
    )
    issue = one.instructions * config.num_warps / ISSUES
    products = PRODUCTS[kernel] * tile * width / processor.multiplications
    unhidden = LOAD_CYCLES * (config.num_stages == 1) + STEP_CYCLES + issue + products
    return max(issue, products, tile / EXPONENTIALS, unhidden / blocks) / tile


def search(arch: int, kernel: str, width: int, forms: tuple[str, ...]) -> tuple[float, Config]:
    """The configuration whose worst form takes the fewest cycles."""
    best, shipped = (math.inf, None), configs.choose
    for config in candidates(kernel):
        configs.choose = lambda name, *rest, c=config: c if name == kernel else shipped(name, *rest)
        worst = 0.0
        try:
            for form in forms:
                if worst < best[0]:
                    worst = max(worst, measured(arch, kernel, width, config, form))
        except (CompilationError, OutOfResources, RuntimeError):
            continue
        finally:
            configs.choose = shipped
        best = min(best, (worst, config), key=operator.itemgetter(0))
    return best


def measured(arch: int, kernel: str, width: int, config: Config, form: str) -> float:
    """Cycles, infinite where registers spill or memory does not suffice."""
    (one,) = compiled.compiled(form, torch.bfloat16, width, kernels=(KERNELS[kernel],))
    if one.spills or one.shared > MULTIPROCESSORS[arch].shared:
        return math.inf
    return cycles(arch, kernel, width, config, one)


def main(arch: str, *widths: str) -> None:
    driver.set_active(compiled.Processor(int(arch)))
    for width, kernel, heavy in itertools.product(map(int, widths), KERNELS, FORMS):
        forms = FORMS[heavy]
        if kernel == "backward_table":
            forms = ("distance",)
        if not (heavy and kernel == "backward_table"):
            found, config = search(int(arch), kernel, width, forms)
            kind = "heavy" if heavy else "light"
            print(f"{width} {kernel} {kind} {found:.3f} {config}", flush=True)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main(sys.argv[1], *(sys.argv[2:] or map(str, compiled.WIDTHS)))
