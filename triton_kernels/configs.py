"""Sizes of blocks, by processor, width of a head and direction. Nothing is tuned at call time."""

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


def choose(kernel: str, arch: int | str, dtype: torch.dtype, block_d: int) -> Config:
    if kernel == "backward_keys":
        return Config(16, 32)
    if kernel == "backward_table":
        return Config(32, 32)
    return Config(32, 16)
