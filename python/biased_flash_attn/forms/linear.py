"""Biases that are proportional to the distance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..geometry import Geometry
from .base import Layout, register
from .chunk_pairs import Pair
from .cumulative import limited_gain
from .distance import Distance, DistanceMass, mass_for_pair
from .other_tokens import DecodableForm, DistributableForm
from .skippable import SkippableForm, StateBounds
from .tail_mass import KeySide


@dataclass(frozen=True, eq=False, repr=False)
class Linear(SkippableForm, DecodableForm, DistributableForm):
    """b_ij = -slopes_h |d|, slopes (B or 1, H or 1)."""

    slopes: Tensor

    name = "linear"
    tensor_names = ("slopes",)
    fits_any_geometry = True

    @property
    def tensors(self) -> tuple[Tensor]:
        return (self.slopes,)

    def layouts(self, geometry: Geometry, real: torch.dtype) -> list[Layout]:
        return [Layout(self.slopes, real, ())]

    def dense(self, geometry: Geometry) -> Tensor:
        """The bias of every pair, (B or 1, H, n_query, n_key) float64."""
        d = geometry.pair_distances(self.slopes.device)
        return -limited_gain(self.slopes)[..., None, None] * d.abs()

    def accumulators(self, batch: int, sequences: int, heads: int) -> list[Tensor]:
        return [self.slopes.new_zeros(sequences, heads)]

    def mass(self, side: KeySide, geometry: Geometry) -> DistanceMass:
        return Distance(self._table(geometry.distances(self.slopes.device))).mass(side, geometry)

    def for_pair(self, pair: Pair, states: None) -> Linear | Distance:
        """A table for two different chunks, whose true distances the kernels do not receive."""
        if pair.is_own:
            return self
        d = pair.geometry.distances(self.slopes.device) + pair.distance_offset
        return Distance(self._table(d).to(self.slopes.dtype))

    def mass_for_pair(self, pair: Pair, side: KeySide, bounds: StateBounds | None) -> DistanceMass:
        return mass_for_pair(self.for_pair(pair, None).table, pair, side)

    def _table(self, distances: Tensor) -> Tensor:
        return -limited_gain(self.slopes)[..., None] * distances.abs()


register(Linear.name, lambda tensors: Linear(*tensors))
