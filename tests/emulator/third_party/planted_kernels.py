"""Kernels that faults are planted into: a matrix product in Triton, and our own forward pass."""

from __future__ import annotations

from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.emulator.third_party.planted import Target
from tests.emulator.triton_device import Device, installed, leaves

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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
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


def product() -> tuple[Tensor, Tensor]:
    a, b = torch.randn(ROWS, INNER).half(), torch.randn(INNER, COLUMNS).half()
    c = torch.empty(ROWS, COLUMNS).half()
    grid = triton.cdiv(ROWS, 64), triton.cdiv(COLUMNS, 64)
    matmul_kernel[grid](
        a,
        b,
        c,
        ROWS,
        INNER,
        COLUMNS,
        BLOCK_M=64,
        BLOCK_N=64,
        BLOCK_K=32,
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=True,
    )
    return c, a.double() @ b.double()


def attention() -> tuple[Tensor, Tensor]:
    from biased_flash_attn.triton_kernels import configs, launch

    from biased_flash_attn.forms import Geometry, NoBias
    from biased_flash_attn.problem import Problem

    q, k, v = (torch.randn(BATCH, HEADS, TOKENS, WIDTH).bfloat16() for _ in range(3))
    scale = WIDTH**-0.5
    geometry = Geometry(TOKENS, TOKENS)
    # The edits fit this configuration, which may differ from the shipped one.
    config = configs.Config(128, 128, num_warps=8, num_stages=2)
    with mock.patch.object(configs, "choose", return_value=config):
        o, *_ = launch.forward(Problem(q, k, v, NoBias(), geometry, scale, 0.0, "triton"))
    wide = (x.double() for x in (q, k, v))
    attended = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, scale=scale)
    return o, attended


class Recorder(Device):
    """Records the last launch without executing it."""

    def run(self, compiled, grid, arguments) -> None:
        kinds = compiled.src.signature.items()
        self.ptx, self.grid = compiled.asm["ptx"], grid
        self.shared_bytes = compiled.metadata.shared
        self.arguments = [
            x for name, kind in kinds for x in leaves(kind, arguments[name], iter(()))
        ]


def targets(arch: int) -> dict[str, Target]:
    """The kernels as compiled for an architecture, and their arguments."""
    made = {}
    with installed(Recorder(arch)) as device:
        for launched in (product, attention):
            out, exact = launched()
            made[f"{launched.__name__}-{arch}"] = Target(
                device.ptx, device.grid, device.arguments, device.shared_bytes, out, exact
            )
    return made
