"""Keys and values in tensors of the caller's, which are written to and read where they are."""

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
        """How many keys of a sequence have a place."""
        return self.table.shape[1] * self.rows

    def write(self, k: Tensor, v: Tensor, lengths: Tensor, backend: str) -> None:
        """k (B, n, Hkv, D) and v (B, n, Hkv, Dv) become the last of so many keys, (B,) int64."""
        for pages, rows in ((self.k, k), (self.v, v)):
            pages, rows = pages.transpose(1, 2), rows.transpose(1, 2)
            operators.append(pages, rows, self.table, lengths, backend)

    def holds(self, lengths: Tensor) -> Tensor:
        """Where the table has to name entries for so many keys of each sequence, (B, columns)."""
        columns = torch.arange(self.table.shape[1], device=self.table.device)
        return columns * self.rows < lengths[:, None]

    def packed(self, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """k and v (total, Hkv, D or Dv) and where in them each sequence begins, (B,).

        They are the caller's own memory but for pages, of which those of the first `lengths` keys
        are copied, and for a cache whose entries do not follow one another.
        """
        entries = torch.where(self.holds(lengths), self.table, 0).long()
        if entries.shape[1] == 1:
            return self.k.flatten(0, 1), self.v.flatten(0, 1), entries[:, 0] * self.rows
        longest = int(lengths.max()) if len(lengths) else 0
        columns = -(-longest // self.rows)
        pages = entries[:, :columns].flatten()
        begin = torch.arange(len(entries), device=pages.device) * columns * self.rows
        return self.k[pages].flatten(0, 1), self.v[pages].flatten(0, 1), begin
