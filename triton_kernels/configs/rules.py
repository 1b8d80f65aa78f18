"""What a configuration is, and the rules by which a problem gets one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

# Rows or columns of a tile: offsets within it and padding of tables are made for as many.
LARGEST_TILE = 128


@dataclass(frozen=True)
class Config:
    """A block of queries, a tile of keys, and how a processor runs them.

    ahead: whether the product of a bias's factors is computed a tile before it is needed.
    """

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 1
    ahead: bool = False

    def __post_init__(self):
        if max(self.block_m, self.block_n) > LARGEST_TILE:
            raise ValueError(f"{self} has a tile of more than {LARGEST_TILE} rows or columns")


@dataclass(frozen=True)
class Features:
    """What of a problem decides how many registers its kernels take."""

    form: str
    gain: bool = False
    plan: bool = False
    bias_gradient: bool = False  # whether gradients of sums are computed
    causal: bool = True
    window: bool = False
    wide_offsets: bool = False  # whether offsets in a head take 64 bits
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Rule:
    """A configuration for problems with the features that are given; None stands for any."""

    config: Config
    form: str | None = None
    gain: bool | None = None
    plan: bool | None = None
    bias_gradient: bool | None = None
    causal: bool | None = None
    window: bool | None = None
    wide_offsets: bool | None = None
    dtype: torch.dtype | None = None

    def matches(self, features: Features) -> bool:
        given = {field.name: getattr(self, field.name) for field in fields(Features)}
        return all(x is None or x == getattr(features, name) for name, x in given.items())


# The first that matches a problem serves it.
Rules = Sequence[Rule]


@dataclass(frozen=True)
class Row:
    """The rules of each kernel for heads of a width."""

    forward: Rules
    backward_queries: Rules
    backward_keys: Rules
    backward_table: Rules = ()  # of a bias that is a function of the distance
