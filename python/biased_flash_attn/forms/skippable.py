"""What a form adds whose distant keys may be skipped."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from ..geometry import Geometry
from .base import Form
from .chunk_pairs import Pair
from .tail_mass import KeySide, TailMass


class SkippableForm(Form):
    """A form that bounds the softmax mass of distant keys (DESIGN.md, "Certified skipping")."""

    may_skip = True

    def decays(self, geometry: Geometry, log_tolerance: float) -> bool:
        """Whether skipping may save enough to make a plan; a fast heuristic."""
        return True

    @abstractmethod
    def mass(self, side: KeySide, geometry: Geometry) -> TailMass:
        """The bound of the bias's contribution to the softmax mass on one side of the queries."""

    def roundings(self, dtype: torch.dtype) -> Tensor | float:
        """A bound of kernel errors in addition to the rounding of logits, in units of 2^-23. dtype:
        that of q."""
        return 0.0

    @abstractmethod
    def mass_for_pair(self, pair: Pair, side: KeySide, bounds: StateBounds | None) -> TailMass:
        """The bound for the keys of another chunk, from the bounds of their states."""


class StateBounds(NamedTuple):
    """The state at the queries of a chunk, and the smallest and largest state of the keys of
    another chunk before each cut, (..., T + 1)."""

    at_query: Tensor
    lowest: Tensor
    highest: Tensor
