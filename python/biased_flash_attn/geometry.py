"""Positions, distances and visibility of the queries and keys of a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .sequences import Sequences
from .shared_constants import LARGEST_STEP


@dataclass(frozen=True)
class Geometry:
    """The positions of the queries relative to the keys, and the visibility mask.

    Query i has position p_i = i + n_key - n_query + shift: the position of the last query is that
    of the last key, plus shift. Key j is visible to query i if j <= p_i, unless causal is False,
    and, with a window, only if p_i - j < window.

    With sequences, this applies to each of them with its own lengths; n_query, n_key and shift are
    then maxima over the sequences.
    """

    n_query: int
    n_key: int
    causal: bool = True
    window: int | None = None
    sequences: Sequences | None = None
    shift: int = 0

    @property
    def query_rows(self) -> int:
        """The length of a tensor with one entry per query."""
        return self.n_query if self.sequences is None else self.sequences.query_rows

    @property
    def key_rows(self) -> int:
        """The length of a tensor with one entry per key."""
        return self.n_key if self.sequences is None else self.sequences.key_rows

    @property
    def places(self) -> int:
        """The length of a tensor of steps: one per key, and one per position up to the last
        query."""
        return self.n_key + self.shift if self.sequences is None else self.sequences.places

    @property
    def first_distance(self) -> int:
        """The smallest distance of a visible pair, where a distance table begins."""
        return 0 if self.causal else 1 - self.n_query

    @property
    def n_distances(self) -> int:
        """The length of a distance table: the number of distances of visible pairs, at least 1."""
        reach = self.n_key + self.shift
        if self.window is not None:
            reach = min(reach, self.window)
        return max(1, reach - self.first_distance)

    def distances(self, device: torch.device | None = None) -> Tensor:
        """Returns the distances of a table, (n_distances,) float64."""
        first = self.first_distance
        end = first + self.n_distances
        return torch.arange(first, end, dtype=torch.float64, device=device)

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Returns p_i, (n_query,) int64; negative for queries before the first key."""
        end = self.n_key + self.shift
        return torch.arange(end - self.n_query, end, device=device)

    def row_positions(self, device: torch.device | None = None) -> Tensor:
        """Returns p_i for each row of q, (B or 1, query_rows) int64; arbitrary for padding."""
        if self.sequences is None:
            return self.positions(device)[None]
        return self.sequences.positions()

    def prefix_sums(self, steps: Tensor) -> Tensor:
        """Returns the prefix sums of steps (B or 1, H, places) along each sequence, float64.

        Steps saturate at ±LARGEST_STEP, so that sums beyond one of them remain exact.
        """
        steps = steps.double().clamp(-LARGEST_STEP, LARGEST_STEP)
        if self.sequences is None:
            return steps.cumsum(-1)
        return self.sequences.prefix_sums(steps)

    def at_queries(self, keys: Tensor) -> Tensor:
        """Selects from keys (..., key_rows) the entries at the positions of the queries."""
        if self.sequences is None:
            return keys[..., self.n_key - self.n_query :]
        return self.sequences.at_queries(keys)

    def pair_distances(self, device: torch.device | None = None) -> Tensor:
        """Returns p_i - j, (n_query, n_key) int64."""
        return self.positions(device)[:, None] - torch.arange(self.n_key, device=device)

    def visible(self, device: torch.device | None = None) -> Tensor:
        """Returns the visibility mask, (n_query, n_key) bool."""
        d = self.pair_distances(device)
        seen = d >= 0 if self.causal else torch.ones_like(d, dtype=torch.bool)
        return seen if self.window is None else seen & (d < self.window)
