"""No bias."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..geometry import Geometry
from .base import Layout, register
from .chunk_pairs import Pair
from .other_tokens import DecodableForm, DistributableForm


@dataclass(frozen=True, eq=False, repr=False)
class NoBias(DecodableForm, DistributableForm):
    """b_ij = 0."""

    name = "none"
    tensors = ()
    fits_any_geometry = True

    def layouts(self, geometry: Geometry, real: torch.dtype) -> list[Layout]:
        return []

    def dense(self, geometry: Geometry) -> Tensor:
        return torch.zeros((), dtype=torch.float64)

    def for_pair(self, pair: Pair, states: None) -> NoBias:
        return self


register(NoBias.name, lambda tensors: NoBias())
