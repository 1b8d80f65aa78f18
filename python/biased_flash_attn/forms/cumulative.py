"""Biases that are sums of steps between the query and the key, or functions of these sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import sequences
from ..geometry import Geometry
from ..shared_constants import LARGEST_GAIN, LARGEST_SUM
from .base import Layout, register
from .chunk_pairs import Pair
from .other_tokens import DecodableForm, DistributableForm
from .skippable import SkippableForm, StateBounds
from .tail_mass import KeySide, TailMass

KERNELS = (None, "log1p_square")
_GAINS, _SAMPLED_GAINS = 5, 512  # gains with exact sums, and samples from which they are chosen


@dataclass(frozen=True, eq=False, repr=False)
class Cumulative(SkippableForm, DecodableForm, DistributableForm):
    """b_ij = beta, or -log(1 + beta^2) when kernel is "log1p_square", where

        beta = g_i (C[p_i] - C[j])    for keys up to the query's position,
        beta = g_i (C[j] - C[p_i])    for keys after it.

    sums C (B or 1, H or 1, places) float64 are inclusive cumulative sums over the keys and any
    later positions up to the last query, zero before the first key; gain g is
    (B or 1, H or 1, n_query), or None for ones.
    """

    sums: Tensor
    gain: Tensor | None = None
    kernel: str | None = None

    tensor_names = ("steps", "gains")
    per_token = True
    per_row = True

    @property
    def name(self) -> str:
        return self.kernel or "cumulative"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.sums,) if self.gain is None else (self.sums, self.gain)

    def layouts(self, geometry: Geometry, real: torch.dtype) -> list[Layout]:
        sums = Layout(self.sums, torch.float64, (geometry.places,))
        if self.gain is None:
            return [sums]
        return [sums, Layout(self.gain, real, (geometry.query_rows,))]

    def dense(self, geometry: Geometry) -> Tensor:
        """The bias of every pair, (B or 1, H or 1, n_query, n_key) float64."""
        device = self.sums.device
        exclusive_sums = pad(self.sums, (1, 0))
        at_query = exclusive_sums[..., geometry.positions(device).clamp(min=-1) + 1]
        beta = at_query[..., :, None] - self.sums[..., None, : geometry.n_key]
        beta = torch.where(geometry.pair_distances(device) >= 0, beta, -beta)
        if self.gain is not None:
            beta = limited_gain(self.gain)[..., None] * beta
        return beta if self.kernel is None else of_squared(beta)

    def for_sequence(self, rows: sequences.Sequence, whole: Geometry, own: Geometry) -> Cumulative:
        gain = None if self.gain is None else rows.queries(self.gain)
        return Cumulative(rows.places(self.sums), gain, self.kernel)

    def mass(self, side: KeySide, geometry: Geometry) -> TailMass:
        sums = -self.sums.flip(-1) if side.is_mirrored else self.sums
        if self.kernel is None:
            return CumulativeMass(side, sums, self.gain)
        ends = -side.prefix_max(-sums), side.prefix_max(sums)
        return self._range_mass(side, StateBounds(side.at_queries(sums), *ends))

    def roundings(self, dtype: torch.dtype) -> Tensor | float:
        return 0.0 if self.gain is None else 16 * LARGEST_SUM * limited_gain(self.gain).abs()

    @property
    def state(self) -> Tensor:
        return self.sums

    def with_state(self, state: Tensor) -> Cumulative:
        return Cumulative(state, self.gain, self.kernel)

    def continued(self, before: Tensor) -> Cumulative:
        return self.with_state(before + self.sums)

    def for_tokens(self, tokens: slice, queries: slice) -> Cumulative:
        return self.for_queries(queries).with_state(self.sums[..., tokens])

    def for_queries(self, queries: slice) -> Cumulative:
        gain = None if self.gain is None else self.gain[..., queries]
        return Cumulative(self.sums, gain, self.kernel)

    def for_pair(self, pair: Pair, states: tuple[Tensor, Tensor]) -> Cumulative:
        """The sums of the keys, followed by those of the queries: only differences matter."""
        queries, keys = states
        if pair.is_own:
            return self.with_state(keys)
        both = torch.cat([keys, queries], -1)
        return self.with_state(both if pair.is_past else -both)

    def mass_for_pair(self, pair: Pair, side: KeySide, bounds: StateBounds) -> RangeMass:
        return self._range_mass(side, bounds)

    def _range_mass(self, side: KeySide, bounds: StateBounds) -> RangeMass:
        gain = torch.ones_like(bounds.at_query) if self.gain is None else limited_gain(self.gain)
        return RangeMass(side, bounds, gain, self.kernel is not None)


class CumulativeMass:
    """The bound for b = g_i (C[p_i] - C[j]), sums C (B or 1, H or 1, n_key), gain (..., n_query).

    log sum_j exp(-g C[j]) is convex in g, so its chord between two gains is an upper bound for all
    gains in between. It is computed exactly for a few gains only. Without gain it is exact.
    """

    def __init__(self, side: KeySide, sums: Tensor, gain: Tensor | None):
        self.side = side
        self.at_query = side.at_queries(sums)
        if gain is None:
            self.gain = None
            self.log_sums = self._prefixes(sums)[..., None, :]
            return
        self.gain = limited_gain(gain)
        # The smallest gains determine what a tile of queries may skip, so most nodes are small.
        sample = self.gain[..., :: max(1, self.gain.shape[-1] // _SAMPLED_GAINS)].sort(-1).values
        nodes = torch.linspace(0, 1, _GAINS, device=gain.device) ** 3 * (sample.shape[-1] - 1)
        grid = sample[..., nodes.round().long()]
        grid[..., 0], grid[..., -1] = self.gain.amin(-1), self.gain.amax(-1)
        self.left = (torch.searchsorted(grid, self.gain, right=True) - 1).clamp(0, _GAINS - 2)
        low, high = grid.gather(-1, self.left), grid.gather(-1, self.left + 1)
        self.weight = torch.where(high > low, (self.gain - low) / (high - low), 0)
        prefixes = [self._prefixes(grid[..., n, None] * sums) for n in range(_GAINS)]
        self.log_sums = torch.stack(prefixes, -2)

    def _prefixes(self, sums: Tensor) -> Tensor:
        """log sum over j < cut of exp(-sums), (..., tiles + 1)."""
        per_tile = self.side.in_tiles(-sums).logsumexp(-1)
        return pad(per_tile.logcumsumexp(-1), (1, 0), value=-torch.inf)

    def log_mass(self, rows: slice, tile: Tensor) -> Tensor:
        stride = self.log_sums.shape[-1]
        flat = self.log_sums.flatten(-2).expand(*tile.shape[:2], -1)
        if self.gain is None:
            return flat.gather(-1, tile) + self.at_query[..., rows]
        low = tile + stride * self.left[..., rows]
        weight = self.weight[..., rows]
        chord = flat.gather(-1, low) * (1 - weight) + flat.gather(-1, low + stride) * weight
        return chord + self.gain[..., rows] * self.at_query[..., rows]


@dataclass(frozen=True)
class RangeMass:
    """The bound in which every key before a cut has the largest bias in the range of the sums.

    squared: whether the bias is -log(1 + beta^2).
    """

    side: KeySide
    bounds: StateBounds
    gain: Tensor
    squared: bool

    def log_mass(self, rows: slice, tile: Tensor) -> Tensor:
        lowest, highest = (
            x.expand(*tile.shape[:2], -1).gather(-1, tile)
            for x in (self.bounds.lowest, self.bounds.highest)
        )
        at_query, gain = self.bounds.at_query[..., rows], self.gain[..., rows]
        if self.squared:
            gap = torch.maximum(at_query - highest, lowest - at_query).clamp(min=0)
            bias = of_squared(gain * gap)
        else:
            bias = torch.maximum(gain * (at_query - lowest), gain * (at_query - highest))
        return torch.log(self.side.cut(tile)) + bias


def limited_gain(gain: Tensor) -> Tensor:
    """Returns slopes or gains in float64, saturated as in the kernels."""
    return gain.double().clamp(-LARGEST_GAIN, LARGEST_GAIN)


def of_squared(beta: Tensor) -> Tensor:
    """Returns -log(1 + beta^2), in which beta saturates as gains do."""
    return -torch.log1p(limited_gain(beta).square())


def in_float32(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two float32 numbers whose sum is the prefix sum; the second one is 0 where the first
    one is infinite or NaN."""
    high = sums.float()
    return high, torch.where(high.isfinite(), sums - high, 0).float()


def _rebuilt(kernel: str | None, tensors: Sequence[Tensor]) -> Cumulative:
    return Cumulative(*tensors, kernel=kernel)


for _kernel in KERNELS:
    register(_kernel or "cumulative", partial(_rebuilt, _kernel))
