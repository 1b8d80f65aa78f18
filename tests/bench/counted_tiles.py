"""Counts the tiles that the kernels' own code iterates over, in Triton's interpreter.

    python -m tests.bench.counted_tiles N FORM ...

prints a JSON list with form, causal, kernel, block sizes, and the iterations of each loop for each
block. Kernels with the same parameters that only count stand in for those of attention.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from biased_flash_attn.triton_kernels import launch
from biased_flash_attn.triton_kernels.attention.tile_ranges import over_keys, over_queries
from biased_flash_attn.triton_kernels.launch import (
    attention,
    relative_gradient,
    table_gradient,
)
from biased_flash_attn.triton_kernels.operands import Head
from triton.runtime import driver

from bench.estimates.report import FORMS_WITH
from bench.estimates.tiles import BAND, DKV, DQ, FAR, FORWARD, RELATIVE, TABLE
from bench.machine_code.compiled import Processor
from biased_flash_attn.forms import Geometry, from_tensors
from biased_flash_attn.problem import Problem

WIDTH, LOOPS = 64, 8


@triton.jit
def store_count(head, out, number, part):
    count = (tl.maximum(part.end - part.begin, 0) + part.block - 1) // part.block
    tl.store(out + number, count)
    return number + 1


@triton.jit
def count_tiles(
    out,
    bias,
    problem,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    loops: tl.constexpr,
    of_queries: tl.constexpr,
):
    block = tl.program_id(1)
    head, out = Head(bias, problem, 0, 0), out + block * loops
    if of_queries:
        over_keys(store_count, head, out, 0, block * block_m, block_m, block_n)
    else:
        over_queries(store_count, head, out, 0, block * block_n, block_m, block_n)


class Counts:
    """Stands in for a kernel. found: block_m, block_n, and the iterations of each block."""

    def __init__(self, kernel: str):
        self.kernel = kernel

    def __getitem__(self, grid):
        def count(*operands, **sizes):
            blocks = sizes["BLOCK_M"], sizes["BLOCK_N"]
            out = torch.full((grid[1], LOOPS), -1, dtype=torch.int32)
            count_tiles[grid](out, *operands[-2:], *blocks, LOOPS, self.kernel != DKV)
            self.found = *blocks, [[n for n in block if n >= 0] for block in out.tolist()]

        return count


class Diagonals:
    """Stands in for the kernel of a gradient of tables. first: which operand the first diagonal is,
    from the end."""

    def __init__(self, n: int, first: int):
        self.n, self.first = n, first

    def __getitem__(self, grid):
        def count(*operands, **sizes):
            block, first = sizes["BLOCK"], operands[-self.first]
            tiles = -(-self.n // block)
            diagonals = range(first, first + grid[1])
            iterations = [[max(0, min(tiles, tiles + x) - max(x, 0))] for x in diagonals]
            self.found = block, block, iterations

        return count


def tensors(form: str, n: int, causal: bool) -> list[torch.Tensor]:
    distances = torch.arange(0 if causal else 1 - n, n)
    if form == "linear":
        return [torch.ones(1, 1)]
    if form == "distance":  # 0 from FAR on, which products of bfloat16 have exactly
        return [(torch.randn(len(distances)) * (distances.abs() < FAR)).view(1, 1, -1)]
    if form.startswith("relative"):
        return [torch.randn(1, 1, *size) for size in ((n, 16), (16, BAND), (n, 0), (0, BAND))]
    if form == "normalized":
        sizes = len(distances), n, 1, 2, 2
        return [torch.randn(1, 1, size) for size in sizes]
    return [torch.randn(1, 1, n, n)] if form == "dense" else []


def counted(form: str, n: int, causal: bool) -> list[list]:
    stand_ins = {name: Counts(name) for name in (FORWARD, DQ, DKV)}
    for name, counts in stand_ins.items():
        setattr(attention, name, counts)
    if form in FORMS_WITH[TABLE]:
        stand_ins[TABLE] = table_gradient.attn_bwd_table_kernel = Diagonals(n, first=4)
    if form in FORMS_WITH[RELATIVE]:
        stand_ins[RELATIVE] = relative_gradient.attn_bwd_relative_kernel = Diagonals(n, first=3)
    q, k, v = torch.randn(3, 1, 1, n, WIDTH, dtype=torch.bfloat16)
    lowered = from_tensors(form, tensors(form, n, causal))
    problem = Problem(q, k, v, lowered, Geometry(n, n, causal, None), 0.125, 0.0, "triton")
    o, lse, *softmax = launch.forward(problem)
    launch.backward(problem, o, *softmax, v, lse, True)
    return [[form, causal, name, *counts.found] for name, counts in stand_ins.items()]


def main(n: int, *forms: str) -> None:
    driver.set_active(Processor(90))
    print(json.dumps([x for form in forms for c in (True, False) for x in counted(form, n, c)]))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
