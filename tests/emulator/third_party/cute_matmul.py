"""A product by the kernels of cute_matmul.cu."""

from __future__ import annotations

import re

import torch

from tests.emulator import TensorMap
from tests.emulator.third_party.planted import Target

# Two tiles of rows and two of columns, the last ones partial, and more tiles along the inner
# dimension than stages.
ROWS, COLUMNS, INNER = 200, 136, 232
BLOCK, BLOCK_K, STAGES = 128, 64, 3
TILES_K = -(-INNER // BLOCK_K)
SHARED_BYTES = (STAGES * 2 * BLOCK * BLOCK_K + BLOCK * BLOCK) * 2 + 1024  # and the barriers


def target(module_ptx: str, name: str) -> Target:
    """The part of the module's PTX that belongs to the kernel, with its arguments."""
    head, *entries = re.split(r"^(?=\.visible \.entry )", module_ptx, flags=re.MULTILINE)
    (entry,) = (e for e in entries if e.startswith(f".visible .entry {name}("))
    blocks_of_cluster = 2 if name == "matmul_cluster" else 1
    a, b = torch.randn(ROWS, INNER).half() / 4, torch.randn(COLUMNS, INNER).half() / 4
    c = torch.empty(ROWS, COLUMNS).half()
    maps = [
        TensorMap(a, (BLOCK, BLOCK_K), swizzle=128),
        TensorMap(b, (BLOCK // blocks_of_cluster, BLOCK_K), swizzle=128),
        TensorMap(c, (BLOCK, BLOCK)),
    ]
    grid = -(-ROWS // BLOCK), -(-COLUMNS // BLOCK), 1
    exact = a.double() @ b.double().T
    return Target(head + entry, grid, [*maps, TILES_K], SHARED_BYTES, c, exact)
