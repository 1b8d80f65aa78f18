"""Compiled Triton kernels with tensor descriptors and tensor memory, against torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.emulator.triton_device import triton_device

BLOCK_N, BLOCK_K = 64, 64
OPTIONS = {"num_stages": 3, "enable_fp_fusion": True}


@triton.jit
def of_host(a, b, c, inner, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # noqa: N803
    m, n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, inner, BLOCK_K):
        sums = tl.dot(a.load([m, k]), b.load([k, n]), sums)
    c.store([m, n], sums.to(tl.float16))


@triton.jit
def of_device(
    a,
    b,
    c,
    rows,
    columns,
    inner,
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
):
    a_tiles = tl.make_tensor_descriptor(a, [rows, inner], [inner, 1], [BLOCK_M, BLOCK_K])
    b_tiles = tl.make_tensor_descriptor(b, [inner, columns], [columns, 1], [BLOCK_K, BLOCK_N])
    c_tiles = tl.make_tensor_descriptor(c, [rows, columns], [columns, 1], [BLOCK_M, BLOCK_N])
    m, n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, inner, BLOCK_K):
        sums = tl.dot(a_tiles.load([m, k]), b_tiles.load([k, n]), sums)
    c_tiles.store([m, n], sums.to(tl.float16))


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


# Each case takes one or two seconds to compile a kernel.
@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("made_on", ["host", "device"])
def test_products_through_descriptors_equal_torch(arch, made_on, seed):
    block_m = 64 if arch == 90 else 128
    # No size is a multiple of its block.
    a, b = torch.randn(72, 200).half(), torch.randn(200, 88).half()
    blocks = block_m, BLOCK_N, BLOCK_K
    grid = triton.cdiv(72, block_m), triton.cdiv(88, BLOCK_N)
    for interleaving in range(3):
        c = torch.zeros(72, 88).half()
        with triton_device(arch, seed + interleaving):
            if made_on == "host":
                shapes = [block_m, BLOCK_K], [BLOCK_K, BLOCK_N], [block_m, BLOCK_N]
                maps = map(TensorDescriptor.from_tensor, (a, b, c), shapes)
                of_host[grid](*maps, 200, *blocks, **OPTIONS)
            else:
                of_device[grid](a, b, c, 72, 88, 200, *blocks, **OPTIONS)
        torch.testing.assert_close(c.float(), a.float() @ b.float(), rtol=2e-3, atol=2e-2)


def test_excessive_shared_memory_raises():
    a, b, c = torch.randn(64, 1024).half(), torch.randn(1024, 64).half(), torch.zeros(64, 64).half()
    arguments = a, b, c, 64, 64, 1024, 64, BLOCK_N, BLOCK_K
    with triton_device(90), pytest.raises(OutOfResources, match="shared memory"):
        of_device[1, 1](*arguments, **OPTIONS | {"num_stages": 15})
