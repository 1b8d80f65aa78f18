"""Biases that are piecewise linear functions of a product of a distance and a query's values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import sequences
from ..geometry import Geometry
from .base import Layout, register
from .chunk_pairs import Pair
from .distance import Distance, block_maxima
from .other_tokens import DecodableForm, DistributableForm
from .skippable import SkippableForm, StateBounds
from .tail_mass import KeySide

# Errors of the kernels when they evaluate a segment, in units of 2^-23 times the sum of the
# magnitudes of its terms.
_ROUNDINGS = 4.0


@dataclass(frozen=True, eq=False, repr=False)
class Normalized(SkippableForm, DecodableForm, DistributableForm):
    """b_ij = f_h(g_i t[d]), f_h continuous and linear between the knots.

    For knots[s - 1] <= x < knots[s], f_h(x) = intercepts[h, s] + slopes[h, s] x. The table t is
    (B or 1, H or 1, n_distances), the gain g (B or 1, H or 1, query_rows), knots (1, 1, K) in
    ascending order, slopes and intercepts (B or 1, H or 1, K + 1). As f_h is continuous, the
    gradient of the knots is zero: a shift of a knot exchanges equal values.
    """

    table: Tensor
    gain: Tensor
    knots: Tensor
    slopes: Tensor
    intercepts: Tensor

    name = "normalized"
    tensor_names = ("table values", "gains", "knots", "slopes", "intercepts")
    per_row = True

    def __post_init__(self):
        if self.knots.dim() != 3 or self.knots.shape[:2] != (1, 1):
            raise ValueError(f"knots have shape {tuple(self.knots.shape)}; it must be (1, 1, K)")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.table, self.gain, self.knots, self.slopes, self.intercepts

    @property
    def tables(self) -> tuple[Tensor]:
        return (self.table,)

    def with_tables(self, tables: Sequence[Tensor]) -> Normalized:
        return replace(self, table=tables[0])

    def layouts(self, geometry: Geometry, real: torch.dtype) -> list[Layout]:
        pieces = (self.knots.shape[-1] + 1,)
        return [
            Layout(self.table, real, (geometry.n_distances,)),
            Layout(self.gain, real, (geometry.query_rows,)),
            Layout(self.knots, real, self.knots.shape[2:3]),
            Layout(self.slopes, real, pieces),
            Layout(self.intercepts, real, pieces),
        ]

    def dense(self, geometry: Geometry) -> Tensor:
        """The bias of every visible pair, (B or 1, H or 1, n_query, n_key) float64."""
        return self.function(self.gain.double()[..., None] * Distance(self.table).dense(geometry))

    def function(self, x: Tensor) -> Tensor:
        """f at x (B or 1, H or 1, ...), in its dtype."""
        knots = self.knots.to(x.dtype).flatten()
        segment = torch.searchsorted(knots, x.detach().contiguous(), right=True)
        slope, intercept = (
            _gathered(y.to(x.dtype), segment) for y in (self.slopes, self.intercepts)
        )
        return intercept + slope * x

    def accumulators(self, batch: int, sequences: int, heads: int) -> list[Tensor]:
        table, gain, knots, slopes, intercepts = self.tensors
        return [
            table.new_zeros(len(table), heads, table.shape[2]),
            gain.new_zeros(batch, heads, gain.shape[2]),
            torch.zeros_like(knots),
            *(x.new_zeros(sequences, heads, x.shape[2]) for x in (slopes, intercepts)),
        ]

    def for_sequence(self, rows: sequences.Sequence, whole: Geometry, own: Geometry) -> Normalized:
        form = self.for_entry(rows.entry).within(whole, own)
        return replace(form, gain=rows.queries(self.gain))

    def within(self, whole: Geometry, own: Geometry) -> Normalized:
        return self.with_tables(Distance(self.table).within(whole, own).tables)

    def for_queries(self, queries: slice) -> Normalized:
        return replace(self, gain=self.gain[..., queries])

    def for_pair(self, pair: Pair, states: None) -> Normalized:
        return self.with_tables(Distance(self.table).for_pair(pair, states).tables)

    def extremes(self, block: int) -> tuple[Tensor, Tensor]:
        """The minima and maxima over blocks of `block` entries of the table."""
        return -block_maxima(-self.table, block), block_maxima(self.table, block)

    def decays(self, geometry: Geometry, log_tolerance: float) -> bool:
        """Whether the farthest key of some head's last query is below the tolerance."""
        if self.gain.shape[-1] == 0:
            return False
        with torch.no_grad():
            last = self.function((self.gain[..., -1:] * self.table).double())
        return bool((last[..., -1] - last.amax(-1) < log_tolerance).any())

    def mass(self, side: KeySide, geometry: Geometry) -> NormalizedMass:
        first = geometry.first_distance
        if side.is_mirrored:
            return NormalizedMass(side, self, self.table.flip(-1), 1 - first - geometry.n_distances)
        return NormalizedMass(side, self, self.table, first)

    def roundings(self, dtype: torch.dtype) -> Tensor:
        largest = self.gain.double().abs().amax(-1) * self.table.double().abs().amax(-1)
        terms = self.intercepts.double().abs() + self.slopes.double().abs() * largest[..., None]
        return _ROUNDINGS * terms.amax(-1, keepdim=True)

    def mass_for_pair(
        self, pair: Pair, side: KeySide, bounds: StateBounds | None
    ) -> NormalizedMass:
        table = self.for_pair(pair, None).table
        if pair.is_past:
            return NormalizedMass(side, self, table, 0)
        return NormalizedMass(side, self, table.flip(-1), 1)


class NormalizedMass:
    """The bound in which every key before a cut has the largest value of f that any of them can
    have, from the range of the table over their distances."""

    def __init__(self, side: KeySide, form: Normalized, table: Tensor, first: int):
        self.side, self.form, self.first = side, form, first
        farther = table.double().flip(-1)
        self.lowest = farther.cummin(-1).values.flip(-1)
        self.highest = farther.cummax(-1).values.flip(-1)
        self.knots = form.knots.double()
        self.at_knots = form.function(self.knots)

    def log_mass(self, rows: slice, tile: Tensor) -> Tensor:
        distance = self.side.positions[rows] - self.side.cut(tile) + 1
        entry = (distance - self.first).clamp(0, self.lowest.shape[-1] - 1)
        gain = self.form.gain.double()[..., rows]
        ends = [
            gain * x.expand(*tile.shape[:2], -1).gather(-1, entry)
            for x in (self.lowest, self.highest)
        ]
        low, high = torch.minimum(*ends), torch.maximum(*ends)
        largest = torch.maximum(self.form.function(low), self.form.function(high))
        for at, value in zip(self.knots.unbind(-1), self.at_knots.unbind(-1), strict=True):
            inside = (low < at[..., None]) & (at[..., None] < high)
            value = torch.where(inside, value[..., None], -math.inf)
            largest = torch.maximum(largest, value)
        return torch.log(self.side.cut(tile)) + largest


def _gathered(pieces: Tensor, segment: Tensor) -> Tensor:
    """Selects from pieces (B or 1, H or 1, K + 1) by segment (B or 1, H or 1, ...)."""
    shape = torch.broadcast_shapes(pieces.shape[:2], segment.shape[:2])
    flat = segment.expand(*shape, *segment.shape[2:]).flatten(2)
    selected = pieces.expand(*shape, -1).gather(-1, flat)
    return selected.unflatten(-1, segment.shape[2:])


register(Normalized.name, lambda tensors: Normalized(*tensors))
