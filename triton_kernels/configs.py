"""Sizes of blocks, by processor, width of a head and direction. Nothing is tuned at call time.

The sizes are the largest tried at which no form spills registers in a loop, compiled for the
processor (tests/compiled.py). None has been timed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Config:
    """A block of queries, a tile of keys, and how a processor runs them."""

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 1


KERNELS = ("forward", "backward_queries", "backward_keys", "backward_table")

# By the widest head they serve, the configurations of KERNELS; no head is wider than 256.
HALF = {
    64: (Config(128, 64, 8, 2), Config(64, 64, 8), Config(32, 64, 8), Config(64, 64)),
    128: (Config(128, 64, 8, 2), Config(64, 32, 8), Config(32, 32, 8), Config(64, 64)),
    256: (Config(64, 32, 8), Config(32, 32, 8), Config(32, 32, 8), Config(16, 16)),
}
HALF_BEFORE_HOPPER = {
    64: (Config(128, 64, 8, 2), Config(64, 32), Config(32, 64, 8), Config(64, 64, 8)),
    128: (Config(64, 64, 8, 2), Config(64, 32, 8), Config(32, 64, 8), Config(32, 32)),
    256: (Config(64, 32, 8), Config(32, 32, 8), Config(32, 32, 8), Config(16, 16)),
}
SINGLE = {
    64: (Config(32, 32), Config(32, 32), Config(32, 32), Config(32, 32)),
    128: (Config(16, 32, 8), Config(16, 32, 8), Config(16, 32, 8), Config(32, 32)),
    256: (Config(16, 32, 8), Config(16, 16, 8), Config(16, 16, 8), Config(16, 16)),
}
# Small, so that short sequences have many blocks.
INTERPRETED = (Config(32, 16), Config(32, 16), Config(16, 32), Config(32, 32))


def choose(kernel: str, arch: int | str, dtype: torch.dtype, width: int) -> Config:
    """For one of KERNELS on a processor, width being the larger of q's and v's padded head_dim."""
    if arch == "interpreter":
        configs = INTERPRETED
    else:
        hopper_or_later = not isinstance(arch, int) or arch >= 90
        half = HALF if hopper_or_later else HALF_BEFORE_HOPPER
        table = SINGLE if dtype == torch.float32 else half
        configs = table[min(widest for widest in table if width <= widest)]
    return configs[KERNELS.index(kernel)]
