"""Biases that are arbitrary functions of the distance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..geometry import Geometry
from .base import Layout, register
from .chunk_pairs import Pair
from .other_tokens import DecodableForm, DistributableForm
from .skippable import SkippableForm, StateBounds
from .tail_mass import KeySide

# An upper bound of what underflows in a sum of 2^40 exponentials, relative to the largest one.
_LOST = 1e-290


@dataclass(frozen=True, eq=False, repr=False)
class Distance(SkippableForm, DecodableForm, DistributableForm):
    """b_ij = table[..., d - geometry.first_distance], table (B or 1, H or 1, n_distances)."""

    table: Tensor

    name = "distance"
    tensor_names = ("table values",)
    refuses_infinity = True

    @property
    def tensors(self) -> tuple[Tensor]:
        return (self.table,)

    @property
    def tables(self) -> tuple[Tensor]:
        return (self.table,)

    def with_tables(self, tables: Sequence[Tensor]) -> Distance:
        return Distance(*tables)

    def layouts(self, geometry: Geometry, real: torch.dtype) -> list[Layout]:
        return [Layout(self.table, real, (geometry.n_distances,))]

    def dense(self, geometry: Geometry) -> Tensor:
        """The bias of every visible pair, (B or 1, H or 1, n_query, n_key) float64.

        Distances of invisible pairs are clamped to those of the table.
        """
        entry = geometry.pair_distances(self.table.device) - geometry.first_distance
        return self.table.double()[..., entry.clamp(0, geometry.n_distances - 1)]

    def accumulators(self, batch: int, sequences: int, heads: int) -> list[Tensor]:
        return [self.table.new_zeros(len(self.table), heads, self.table.shape[2])]

    def within(self, whole: Geometry, own: Geometry) -> Distance:
        return Distance(self._entries(own.first_distance - whole.first_distance, own.n_distances))

    def decays(self, geometry: Geometry, log_tolerance: float) -> bool:
        """Whether the farthest quarter of some head's table holds less mass than the tolerance.

        With equal products q.k, any other head can skip at most a sixteenth of its pairs.
        """
        past = self.table[..., -geometry.first_distance :]
        far = past[..., 3 * past.shape[-1] // 4 :].logsumexp(-1) - past.logsumexp(-1)
        return bool((far < log_tolerance).any())

    def mass(self, side: KeySide, geometry: Geometry) -> DistanceMass:
        table, first = self.table.double(), geometry.first_distance
        if side.is_mirrored:
            table, first = table.flip(-1), 1 - first - table.shape[-1]
        return DistanceMass(side, table, first)

    def extremes(self, block: int) -> tuple[None, Tensor]:
        return None, block_maxima(self.table, block)

    def for_pair(self, pair: Pair, states: None) -> Distance:
        first = pair.geometry.first_distance + pair.distance_offset - pair.whole.first_distance
        # Distance 0 of a pair does not occur, and may lie before the table.
        before = max(0, -first)
        part = self._entries(first + before, pair.geometry.n_distances - before)
        return Distance(pad(part, (before, 0)))

    def mass_for_pair(self, pair: Pair, side: KeySide, bounds: StateBounds | None) -> DistanceMass:
        return mass_for_pair(self.for_pair(pair, None).table, pair, side)

    def _entries(self, first: int, count: int) -> Tensor:
        return self.table[..., first : first + count]


def block_maxima(table: Tensor, block: int) -> Tensor:
    """The maxima over blocks of `block` entries of a table (..., n)."""
    missing = -table.shape[-1] % block
    return pad(table, (0, missing), value=-torch.inf).unflatten(-1, (-1, block)).amax(-1)


def mass_for_pair(table: Tensor, pair: Pair, side: KeySide) -> DistanceMass:
    """The bound for a pair's own table, which is reversed if the keys come after the queries."""
    table = table.double()
    return DistanceMass(side, table if pair.is_past else table.flip(-1), int(not pair.is_past))


class DistanceMass:
    """Exact tail sums of exp(table), table (B or 1, H or 1, n) over the distances from `first`."""

    def __init__(self, side: KeySide, table: Tensor, first: int):
        self.side, self.first = side, first
        peak = table.amax(-1, keepdim=True)
        beyond = (table - peak).exp_().flip(-1).cumsum(-1).flip(-1)
        logs = beyond.add_(_LOST).log_().add_(peak)
        self.log_beyond = pad(logs, (0, 1), value=-torch.inf)

    def log_mass(self, rows: slice, tile: Tensor) -> Tensor:
        distance = self.side.positions[rows] - self.side.cut(tile) + 1
        entry = (distance - self.first).clamp(0, self.log_beyond.shape[-1] - 1)
        return self.log_beyond.expand(*tile.shape[:2], -1).gather(-1, entry)


register(Distance.name, lambda tensors: Distance(*tensors))
