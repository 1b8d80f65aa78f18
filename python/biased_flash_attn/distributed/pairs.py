"""Pairs of chunks: the queries of one and the keys of one, as problems that the kernels know.

Where both are the same chunk, that is an ordinary problem. Else all queries lie on one side of all
keys, and only the differences of sums, and the distances that occur, matter: so keys are put right
before the queries, wherever they are. Query i and key j then have the distance n + i - j.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..forms import Geometry
from ..sequences import Sequences
from ..tail_mass import KEY_STEP


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
        """By how much distances are larger than they are taken to be."""
        return (self.query_chunk - self.key_chunk - 1) * self.n

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
        return (begin // KEY_STEP * KEY_STEP, self.n) if begin < self.n else (0, 0)

    @property
    def others(self) -> int:
        """How many other chunks the queries see, at most."""
        return self.query_chunk if self.causal else self.chunks - 1

    @property
    def mask(self) -> tuple[bool, int | None]:
        """causal and window, as the kernels are given them."""
        return self.causal or not self.is_own, self.own_window

    def sequences(self, batch: int, device: torch.device) -> tuple:
        """Where the queries stand, as the operators are given it."""
        if self.is_own:
            return ()
        sequences = Sequences.of_entries(batch, self.n, self.n, device).shifted(self.n, self.n)
        return sequences.rows, self.n, self.n, self.n

    def terms(
        self, form: str, terms: Tensor | None, sums: tuple[Tensor, Tensor] | None
    ) -> tuple[str, Tensor | None]:
        """What the form holds for this pair, of what it holds for the whole sequence.

        sums: of a form with sums, those of the query's chunk and of the key's, (.., n) each.
        """
        if form == "none":
            return form, None
        if sums is not None:
            queries, keys = sums
            if self.is_own:
                return form, keys
            both = torch.cat([keys, queries], -1)
            return form, both if self.is_past else -both
        if form == "linear":
            return (form, terms) if self.is_own else ("distance", self._linear_table(terms))
        return form, self._table(terms)

    def _linear_table(self, slopes: Tensor) -> Tensor:
        d = torch.arange(self.n_distances, device=slopes.device, dtype=torch.float64) + self.moved
        return (-slopes.double()[..., None] * d.abs()).to(slopes.dtype)

    def _table(self, table: Tensor) -> Tensor:
        first = self.moved
        if self.is_own:
            first = 0 if self.causal else 1 - self.n
        if not self.causal:
            first += self.chunks * self.n - 1
        # Distance 0 of a pair does not occur, and may lie before the table.
        before = max(0, -first)
        part = table[..., first + before : first + self.n_distances]
        return torch.nn.functional.pad(part, (before, 0))

    @property
    def n_distances(self) -> int:
        causal, window = self.mask
        shift = 0 if self.is_own else self.n
        return Geometry(self.n, self.n, causal, window, shift=shift).n_distances
