"""Pairs of chunks: the queries of one and the keys of one, as problems that the kernels know.

Where both are the same chunk, that is an ordinary problem. Else all queries lie on one side of all
keys, and only the differences of sums, and the distances that occur, matter: so keys are put right
before the queries, wherever they are. Query i and key j then have the distance n + i - j.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .geometry import Geometry
from .limits import TILE_KEYS
from .sequences import Sequences


@dataclass(frozen=True)
class Pair:
    """The queries of one chunk of n tokens, and the keys of another or the same."""

    query_chunk: int
    key_chunk: int
    n: int
    chunks: int  # of the sequence
    causal: bool
    window: int | None

    @property
    def is_own(self) -> bool:
        return self.query_chunk == self.key_chunk

    @property
    def is_past(self) -> bool:
        return self.key_chunk < self.query_chunk

    @property
    def moved(self) -> int:
        """By how much distances are larger than the kernels are told."""
        return 0 if self.is_own else (self.query_chunk - self.key_chunk - 1) * self.n

    @property
    def own_window(self) -> int | None:
        """The window, for the distances that they are taken to have."""
        if self.window is None or self.is_own:
            return self.window
        left = self.window - self.moved
        return left if self.is_past and left < 2 * self.n else None

    @property
    def seen_keys(self) -> tuple[int, int]:
        """From and to before which keys some query sees, in tiles but for the end."""
        if self.own_window is None:
            return 0, self.n
        begin = max(0, self.n + 1 - self.own_window)
        return (begin // TILE_KEYS * TILE_KEYS, self.n) if begin < self.n else (0, 0)

    @property
    def others(self) -> int:
        """How many other chunks the queries see, at most."""
        return self.query_chunk if self.causal else self.chunks - 1

    @property
    def whole(self) -> Geometry:
        """That of the sequence."""
        return Geometry(self.chunks * self.n, self.chunks * self.n, self.causal, self.window)

    @property
    def geometry(self) -> Geometry:
        """What the kernels are told, but for where the rows are: see `placed`."""
        causal, shift = self.causal or not self.is_own, 0 if self.is_own else self.n
        return Geometry(self.n, self.n, causal, self.own_window, shift=shift)

    def placed(self, batch: int, device: torch.device) -> Geometry:
        """The geometry of a call with so many batch entries."""
        if self.is_own:
            return self.geometry
        sequences = Sequences.of_entries(batch, self.n, self.n, device).shifted(self.n, self.n)
        return replace(self.geometry, sequences=sequences)
