"""The block table, which maps keys of sequences to pages of a pool.

Key j of sequence b is row j % page_size of page table[b, j // page_size % columns]. A table that
covers its sequences is paged storage; a shorter one is a ring buffer of the last keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNASSIGNED = -1
# Pages of a ring in addition to its window, for new tokens and for tokens that may be truncated.
_SPARE_PAGES = 2


class BlockTable:
    """The block table and the list of free pages.

    entries: (batch, columns) int32. Pages are assigned as sequences grow: from a pool of `pages`,
    from one that grows if pages is None, or permanently by the table `given`. With a window, the
    table is a ring with the columns that the window needs.
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
            columns = least + _SPARE_PAGES * self.is_ring
            shape = (batch, columns)
            self.entries = torch.full(shape, UNASSIGNED, dtype=torch.int32, device=device)
        self._assigned = [0] * batch  # number of columns of each sequence with a page
        self._free = list(range(self.pages))[::-1]

    @property
    def columns(self) -> int:
        return self.entries.shape[1]

    @property
    def keys(self) -> int:
        """The number of keys of a sequence that the table can hold."""
        return self.columns * self.page_size

    def missing(self, lengths: list[int]) -> list[int]:
        """Returns the number of additional pages that each sequence needs to hold `lengths` keys.

        Raises ValueError if the pool has too few.
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
        """Assigns `missing` pages to the sequences; the pool has grown to `pages`."""
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
        """Frees the pages beyond `lengths` keys; a ring keeps its pages until it is empty."""
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
        """Returns the pages of keys, and their rows there; sequences and keys broadcast."""
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
                f"cache is full: block_table{lacking[0]} is {UNASSIGNED}, but sequence"
                f" {lacking[0][0]} needs a page there"
            )


def _check(table: Tensor, batch: int, pages: int, least: int) -> None:
    """Validates a block table given by the caller."""
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
        raise ValueError(f"block_table has page {page} more than once; pages must be distinct")
