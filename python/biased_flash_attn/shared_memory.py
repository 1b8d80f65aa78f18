"""The shared memory of NVIDIA GPUs."""

from __future__ import annotations

# KiB per block by architecture, from the table of compute capabilities in the CUDA programming
# guide.
KIBIBYTES = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227}
KIBIBYTES |= {100: 227, 103: 227, 110: 227, 120: 99, 121: 99}


def block_bytes(arch: int) -> int:
    """Returns the most bytes that a block may have on sm_{arch}."""
    return KIBIBYTES[arch] * 1024
