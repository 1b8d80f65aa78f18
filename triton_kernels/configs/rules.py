"""Configurations, and first-match rules that select one by features of the problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from ...shared_constants import PLAN_QUERIES

# The maximum number of rows or columns of a tile, assumed by offsets within it and by padding of
# tables.
LARGEST_TILE = 128


@dataclass(frozen=True)
class Config:
    """Block sizes of queries and keys, and launch parameters.

    ahead: whether the product of a bias's factors is computed one tile ahead. registers: a limit
    per thread, given where ptxas would choose a far lower one and keep the rest in memory.
    """

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 1
    ahead: bool = False
    registers: int | None = None

    def __post_init__(self):
        if max(self.block_m, self.block_n) > LARGEST_TILE:
            raise ValueError(f"{self} has a tile of more than {LARGEST_TILE} rows or columns")
        if self.block_m > PLAN_QUERIES:
            raise ValueError(f"{self} has more queries than a tile of a plan, {PLAN_QUERIES}")


@dataclass(frozen=True)
class Features:
    """The features of a problem that determine how many registers its kernels use."""

    form: str
    gain: bool = False
    plan: bool = False
    bias_gradient: bool = False  # whether gradients of prefix sums are computed
    causal: bool = True
    window: bool = False
    wide_offsets: bool = False  # whether offsets within a head take 64 bits
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Rule:
    """A configuration for problems with the given features; None matches any value."""

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


# The first rule that matches a problem applies.
Rules = Sequence[Rule]


@dataclass(frozen=True)
class Row:
    """The rules of each kernel for one head width."""

    forward: Rules
    backward_queries: Rules
    backward_keys: Rules
    backward_table: Rules = ()  # of a bias that is a function of the distance


def row_of(*configs: Config) -> Row:
    """A row with one configuration for all problems, for each kernel in the order of its fields."""
    return Row(*([Rule(config)] for config in configs))
