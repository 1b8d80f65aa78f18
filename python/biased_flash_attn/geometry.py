"""Positions, distances and visibility of the queries and keys of a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .sequences import Sequences


@dataclass(frozen=True)
class Geometry:
    """Where the queries stand among the keys, and which keys they see.

    Query i has position p_i = i + n_key - n_query + shift: the last query stands on the last key,
    or shift keys beyond it. It sees key j when j <= p_i, unless causal is False, and, with a
    window, only when p_i - j < window.

    Where there are sequences, this holds in each of them, for its own lengths; n_query, n_key and
    shift are then the largest of any.
    """

    n_query: int
    n_key: int
    causal: bool = True
    window: int | None = None
    sequences: Sequences | None = None
    shift: int = 0

    @property
    def query_rows(self) -> int:
        """How many numbers a bias has that has one for each query."""
        return self.n_query if self.sequences is None else self.sequences.query_rows

    @property
    def key_rows(self) -> int:
        """How many numbers a bias has that has one for each key."""
        return self.n_key if self.sequences is None else self.sequences.key_rows

    @property
    def places(self) -> int:
        """How many steps a bias has that sums them: one for each key, and on to the last query."""
        return self.n_key + self.shift if self.sequences is None else self.sequences.places

    @property
    def first_distance(self) -> int:
        """The smallest distance of a visible pair, where a distance table begins."""
        return 0 if self.causal else 1 - self.n_query

    @property
    def n_distances(self) -> int:
        """The length of a distance table: distances of visible pairs, and at least one."""
        reach = self.n_key + self.shift
        if self.window is not None:
            reach = min(reach, self.window)
        return max(1, reach - self.first_distance)

    def distances(self, device: torch.device | None = None) -> Tensor:
        """The distances of a table, (n_distances,) float64."""
        first = self.first_distance
        end = first + self.n_distances
        return torch.arange(first, end, dtype=torch.float64, device=device)

    def positions(self, device: torch.device | None = None) -> Tensor:
        """p_i, (n_query,) int64; negative for queries that stand before the first key."""
        end = self.n_key + self.shift
        return torch.arange(end - self.n_query, end, device=device)

    def running_sums(self, steps: Tensor) -> Tensor:
        """(B or 1, H, places) to sums along each sequence, float64."""
        if self.sequences is None:
            return steps.double().cumsum(-1)
        return self.sequences.running_sums(steps)

    def of_queries(self, keys: Tensor) -> Tensor:
        """What belongs to keys (..., key_rows), of those on which queries stand."""
        if self.sequences is None:
            return keys[..., self.n_key - self.n_query :]
        return self.sequences.of_queries(keys)

    def pair_distances(self, device: torch.device | None = None) -> Tensor:
        """p_i - j, (n_query, n_key) int64."""
        return self.positions(device)[:, None] - torch.arange(self.n_key, device=device)

    def visible(self, device: torch.device | None = None) -> Tensor:
        """Whether query i sees key j, (n_query, n_key) bool."""
        d = self.pair_distances(device)
        seen = d >= 0 if self.causal else torch.ones_like(d, dtype=torch.bool)
        return seen if self.window is None else seen & (d < self.window)
