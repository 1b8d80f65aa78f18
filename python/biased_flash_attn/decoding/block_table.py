"""Which page of a pool holds which keys of a sequence.

Key j of sequence b stands in row j % page_size of page table[b, j // page_size % columns]. A table
as long as its sequences is paged storage, a shorter one a ring that keeps the last keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNASSIGNED = -1
# Pages of a ring beyond its window, for new tokens and for those that may be taken back.
_SPARE = 2


class BlockTable:
    """The table, and the pages that are free.

    entries: (batch, columns) int32. Pages are assigned as sequences grow, from `pages` of them, or
    without end where pages is None; or `given` says which they are, once and for all. As a ring,
    the table has as many columns as a window needs.
    """

    def __init__(
        self,
        batch: int,
        page_size: int,
        device: torch.device,
        window: int | None,
        pages: int | None,
        given: Tensor | None,
    ):
        self.page_size = page_size
        self.is_ring = window is not None
        self.can_grow = pages is None
        self.is_given = given is not None
        self.pages = pages or 0
        least = -(-window // page_size) if self.is_ring else 1
        if self.is_given:
            _check(given, batch, self.pages, least)
            self.entries = given.to(device, torch.int32, copy=True).contiguous()
        else:
            columns = least + _SPARE * self.is_ring
            shape = (batch, columns)
            self.entries = torch.full(shape, UNASSIGNED, dtype=torch.int32, device=device)
        self._assigned = [0] * batch  # columns of each sequence that have a page
        self._free = list(range(self.pages))[::-1]

    @property
    def columns(self) -> int:
        return self.entries.shape[1]

    @property
    def keys(self) -> int:
        """How many keys of a sequence have a place."""
        return self.columns * self.page_size

    def missing(self, lengths: list[int]) -> list[int]:
        """How many pages each sequence lacks to hold so many keys.

        Raises ValueError where there are not enough.
        """
        blocks = [-(-length // self.page_size) for length in lengths]
        if self.is_ring:
            blocks = [min(count, self.columns) for count in blocks]
        if self.is_given:
            self._check_given(blocks, lengths)
            return [0] * len(blocks)
        missing = [max(0, count - own) for count, own in zip(blocks, self._assigned, strict=True)]
        if not self.can_grow and sum(missing) > len(self._free):
            raise ValueError(
                f"cache is full: {sum(missing)} more pages of {self.page_size} keys are needed, and"
                f" of its {self.pages} pages {len(self._free)} are free"
            )
        return missing

    def assign(self, missing: list[int], pages: int) -> None:
        """Gives sequences the pages they lack; the pool has grown to `pages` of them."""
        self._free = list(range(self.pages, pages))[::-1] + self._free
        self.pages = pages
        most = max(
            (own + more for own, more in zip(self._assigned, missing, strict=True)), default=0
        )
        if most > self.columns:
            wider = max(most, 2 * self.columns) - self.columns
            self.entries = torch.nn.functional.pad(self.entries, (0, wider), value=UNASSIGNED)
        for b, more in enumerate(missing):
            for _ in range(more):
                self.entries[b, self._assigned[b]] = self._free.pop()
                self._assigned[b] += 1

    @property
    def free(self) -> int:
        return len(self._free)

    def release(self, lengths: list[int]) -> None:
        """Takes back the pages beyond so many keys; those of a ring once it is empty."""
        if self.is_given:
            return
        for b, length in enumerate(lengths):
            keep = -(-length // self.page_size)
            if self.is_ring and length:
                keep = self.columns
            if keep < self._assigned[b]:
                self._free += self.entries[b, keep : self._assigned[b]].tolist()[::-1]
                self.entries[b, keep:] = UNASSIGNED
                self._assigned[b] = keep

    def find(self, sequences: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The pages and rows of keys, which broadcast with their sequences."""
        pages = self.entries[sequences, keys // self.page_size % self.columns]
        return pages.long(), keys % self.page_size

    def _check_given(self, blocks: list[int], lengths: list[int]) -> None:
        for b, count in enumerate(blocks):
            if count > self.columns:
                raise ValueError(
                    f"cache is full: sequence {b} would have {lengths[b]} keys, and block_table has"
                    f" {self.columns} columns of {self.page_size}"
                )
        columns = torch.arange(self.columns, device=self.entries.device)
        needed = columns < torch.tensor(blocks, device=columns.device)[:, None]
        lacking = (needed & (self.entries == UNASSIGNED)).nonzero().tolist()
        if lacking:
            raise ValueError(
                f"cache is full: block_table{lacking[0]} is {UNASSIGNED}, where sequence"
                f" {lacking[0][0]} needs a page"
            )


def _check(table: Tensor, batch: int, pages: int, least: int) -> None:
    """Raises an error that names what is wrong with a table from outside."""
    if not isinstance(table, Tensor) or table.dtype not in (torch.int32, torch.int64):
        what = table.dtype if isinstance(table, Tensor) else type(table).__name__
        raise TypeError(f"block_table is {what}; it must be an int32 tensor (batch, columns)")
    if table.dim() != 2 or table.shape[0] != batch or table.shape[1] < least:
        raise ValueError(
            f"block_table has shape {tuple(table.shape)}; it must be ({batch}, columns), with"
            f" {least} columns or more"
        )
    outside = ((table < UNASSIGNED) | (table >= pages)).nonzero().tolist()
    if outside:
        b, column = outside[0]
        raise ValueError(
            f"block_table[{b}, {column}] is {table[b, column]}; it may be a page, 0 to {pages - 1},"
            f" or {UNASSIGNED} for none"
        )
    assigned = table[table != UNASSIGNED]
    used, counts = assigned.unique(return_counts=True)
    if (counts > 1).any():
        page = used[counts > 1][0]
        raise ValueError(f"block_table has page {page} more than once; each may stand there once")
