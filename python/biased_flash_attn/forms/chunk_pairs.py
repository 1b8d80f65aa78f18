"""Attention between two chunks of a sequence, expressed as an ordinary problem.

If both are the same chunk, the problem is an ordinary one. Otherwise all queries are on one side of
all keys, and the result depends only on differences of prefix sums and on the entries of the
distance table. The keys are therefore treated as if they directly preceded the queries: query i and
key j have distance n + i - j, and `distance_offset` relates it to their actual distance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..geometry import Geometry
from ..sequences import Sequences
from ..shared_constants import TILE_KEYS


@dataclass(frozen=True)
class Pair:
    """The queries of one chunk of n tokens, and the keys of another or the same."""

    query_chunk: int
    key_chunk: int
    n: int
    chunks: int  # number of chunks of the sequence
    causal: bool
    window: int | None

    @property
    def is_own(self) -> bool:
        return self.query_chunk == self.key_chunk

    @property
    def is_past(self) -> bool:
        return self.key_chunk < self.query_chunk

    @property
    def distance_offset(self) -> int:
        """The actual distance of a pair minus the distance that the kernels use."""
        return 0 if self.is_own else (self.query_chunk - self.key_chunk - 1) * self.n

    @property
    def kernel_window(self) -> int | None:
        """The window relative to the distances that the kernels use; None if it masks no key."""
        if self.window is None or self.is_own:
            return self.window
        left = self.window - self.distance_offset
        return left if self.is_past and left < 2 * self.n else None

    @property
    def visible_keys(self) -> tuple[int, int]:
        """The range [begin, end) of keys that are visible to some query; begin is a multiple of
        TILE_KEYS."""
        if self.kernel_window is None:
            return 0, self.n
        begin = max(0, self.n + 1 - self.kernel_window)
        return (begin // TILE_KEYS * TILE_KEYS, self.n) if begin < self.n else (0, 0)

    @property
    def max_other_chunks(self) -> int:
        """The maximum number of other chunks that are visible to the queries."""
        return self.query_chunk if self.causal else self.chunks - 1

    @property
    def whole(self) -> Geometry:
        """The geometry of the whole sequence."""
        return Geometry(self.chunks * self.n, self.chunks * self.n, self.causal, self.window)

    @property
    def geometry(self) -> Geometry:
        """The geometry of one batch entry: see `batched_geometry`."""
        causal, shift = self.causal or not self.is_own, 0 if self.is_own else self.n
        return Geometry(self.n, self.n, causal, self.kernel_window, shift=shift)

    def batched_geometry(self, batch: int, device: torch.device) -> Geometry:
        """Returns the geometry that is passed to the kernels for `batch` batch entries."""
        if self.is_own:
            return self.geometry
        sequences = Sequences.from_entries(batch, self.n, self.n, device).shifted(self.n, self.n)
        return replace(self.geometry, sequences=sequences)
