"""Caches of keys and values that belong to the caller, written and read in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import operators


@dataclass(frozen=True, eq=False)
class Cache:
    """Key n of sequence b is row n % rows of entry table[b, n // rows].

    k (entries, rows, Hkv, D) and v (entries, rows, Hkv, Dv) are pages or, with one column of the
    table, whole sequences; table (B, columns) is int32.
    """

    k: Tensor
    v: Tensor
    table: Tensor

    @property
    def rows(self) -> int:
        return self.k.shape[1]

    @property
    def capacity(self) -> int:
        """The number of keys that fit into a sequence."""
        return self.table.shape[1] * self.rows

    def write(self, k: Tensor, v: Tensor, lengths: Tensor, backend: str) -> None:
        """Writes k (B, n, Hkv, D) and v (B, n, Hkv, Dv) as the last of `lengths` keys (B,)."""
        for pages, rows in ((self.k, k), (self.v, v)):
            pages, rows = pages.transpose(1, 2), rows.transpose(1, 2)
            operators.append(pages, rows, self.table, lengths, backend)

    def holds(self, lengths: Tensor) -> Tensor:
        """Which columns of the table are needed for `lengths` keys, (B, columns) bool."""
        columns = torch.arange(self.table.shape[1], device=self.table.device)
        return columns * self.rows < lengths[:, None]

    def packed(self, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """k and v (total, Hkv, D or Dv) and the beginning of each sequence in them, (B,).

        They are views, except for pages, of which those of the first `lengths` keys are copied, and
        for a cache whose entries are not contiguous.
        """
        entries = torch.where(self.holds(lengths), self.table, 0).long()
        if entries.shape[1] == 1:
            return self.k.flatten(0, 1), self.v.flatten(0, 1), entries[:, 0] * self.rows
        longest = int(lengths.max()) if len(lengths) else 0
        columns = -(-longest // self.rows)
        pages = entries[:, :columns].flatten()
        begin = torch.arange(len(entries), device=pages.device) * columns * self.rows
        return self.k[pages].flatten(0, 1), self.v[pages].flatten(0, 1), begin
