"""Kernels that faults are planted into: a matrix product in Triton, and our own forward pass.

Run as a program, it compiles both and saves their launches to the file that is named.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from peer_kernels import ROOT
from torch import Tensor

ROWS, INNER, COLUMNS = 100, 208, 80
BATCH, HEADS, TOKENS, WIDTH = 1, 1, 300, 64


@triton.jit
def matmul_kernel(
    a,
    b,
    c,
    rows,
    inner,
    columns,
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
):
    """c (rows, columns) = a (rows, inner) b (inner, columns), all contiguous."""
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    along = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, inner, BLOCK_K):
        k = start + along
        tile_a = tl.load(a + i * inner + k[None, :], (i < rows) & (k[None, :] < inner), 0.0)
        tile_b = tl.load(b + k[:, None] * columns + j, (k[:, None] < inner) & (j < columns), 0.0)
        sums = tl.dot(tile_a, tile_b, sums)
    tl.store(c + i * columns + j, sums.to(tl.float16), (i < rows) & (j < columns))


@dataclass
class SavedLaunch:
    ptx: str
    shared_bytes: int
    grid: tuple[int, ...]
    arguments: list
    out: Tensor  # one of the arguments
    exact: Tensor


def saved_launches(path: Path, arch: int) -> dict[str, SavedLaunch]:
    """The launches, compiled for an architecture."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, str(path), str(arch)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    saved = torch.load(path, weights_only=False)
    return {name: SavedLaunch(**launch) for name, launch in saved.items()}


def product() -> tuple[Tensor, Tensor]:
    a, b = torch.randn(ROWS, INNER).half(), torch.randn(INNER, COLUMNS).half()
    c = torch.empty(ROWS, COLUMNS).half()
    grid = triton.cdiv(ROWS, 64), triton.cdiv(COLUMNS, 64)
    matmul_kernel[grid](
        *(a, b, c, ROWS, INNER, COLUMNS),
        BLOCK_M=64,
        BLOCK_N=64,
        BLOCK_K=32,
        num_warps=4,
        num_stages=3,
    )
    return c, a.double() @ b.double()


def attention() -> tuple[Tensor, Tensor]:
    from biased_flash_attn.triton_kernels import launch

    q, k, v = (torch.randn(BATCH, HEADS, TOKENS, WIDTH).bfloat16() for _ in range(3))
    scale = WIDTH**-0.5
    o, _ = launch.forward(q, k, v, None, None, "none", scale, True, None)
    wide = (x.double() for x in (q, k, v))
    attended = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, scale=scale)
    return o, attended


def main(path: str, arch: str) -> None:
    sys.path.insert(0, str(ROOT / "bench"))
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from compiled import Processor

    driver.set_active(Processor(int(arch)))
    run, seen = JITFunction.run, []

    def compile_only(kernel, *args, grid, warmup, **options):
        binary = run(kernel, *args, grid=grid, warmup=True, **options)
        names = list(inspect.signature(kernel.fn).parameters)
        given = dict(zip(names, args, strict=False)) | options
        kinds = binary.src.signature.items()
        arguments = [leaf for name, kind in kinds for leaf in leaves(kind, given[name])]
        seen.append(
            {
                "ptx": binary.asm["ptx"],
                "shared_bytes": binary.metadata.shared,
                "grid": (*grid, 1, 1)[:3],
                "arguments": arguments,
            }
        )

    JITFunction.run = compile_only
    saved = {}
    for made in (product, attention):
        out, exact = made()
        (launch,) = seen
        saved[made.__name__] = {**launch, "out": out, "exact": exact}
        seen.clear()
    torch.save(saved, path)


def leaves(kind: object, value: object) -> Iterator[object]:
    """The arguments that are passed at run time, of one that may be a nest of tuples."""
    if isinstance(kind, tuple):
        for inner_kind, inner in zip(kind, value, strict=True):
            yield from leaves(inner_kind, inner)
    elif kind != "constexpr":
        yield value


if __name__ == "__main__":
    torch.manual_seed(0)
    main(*sys.argv[1:])
