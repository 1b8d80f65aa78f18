"""The keys of a rank, and the subsets of them that other ranks need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..forms.chunk_pairs import Pair
from ..skipping.plans import query_tiles
from .layout import chunks_of


@dataclass(frozen=True)
class Rows:
    """The chunks of a rank, in the order of their rows in its tensors (B, H, 2n, ...)."""

    chunks: tuple[int, int]
    n: int

    def of(self, chunk: int) -> slice:
        """Returns the rows of a chunk."""
        begin = self.chunks.index(chunk) * self.n
        return slice(begin, begin + self.n)


@dataclass(frozen=True)
class Keys:
    """k and v (B, Hkv, 2n, D), and prefix sums (B or 1, H or 1, 2n) or None, of a rank."""

    rows: Rows
    k: Tensor
    v: Tensor
    sums: Tensor | None

    def of(self, chunk: int) -> tuple[Tensor, Tensor, Tensor | None]:
        at = self.rows.of(chunk)
        sums = None if self.sums is None else self.sums[..., at]
        return self.k[:, :, at], self.v[:, :, at], sums

    def tensors(self, needed: Tensor) -> list[tuple[str, Tensor]]:
        """Returns the contents of a message: the rows selected by the mask needed (B, Hkv, 2n);
        prefix sums are selected if any head needs them."""
        tensors = [("keys", self.k[needed]), ("values", self.v[needed])]
        if self.sums is not None:
            tensors.append(("sums", self.sums[..., any_head(needed)]))
        return tensors

    def empty_tensors(self, needed: Tensor) -> list[Tensor]:
        """Returns empty tensors for a message from another rank."""
        count = int(needed.sum())
        tensors = [x.new_empty((count, x.shape[3])) for x in (self.k, self.v)]
        if self.sums is not None:
            shape = (*self.sums.shape[:2], int(any_head(needed).sum()))
            tensors.append(self.sums.new_empty(shape))
        return tensors

    def received(self, rank: int, ranks: int, needed: Tensor, tensors: list[Tensor]) -> Keys:
        """Returns the keys of another rank from a message; keys that were not sent are 0."""
        k, v = torch.zeros_like(self.k), torch.zeros_like(self.v)
        k[needed], v[needed] = tensors[:2]
        sums = None
        if self.sums is not None:
            sums = torch.zeros_like(self.sums)
            sums[..., any_head(needed)] = tensors[2]
        return Keys(Rows(chunks_of(rank, ranks), self.rows.n), k, v, sums)


def any_head(needed: Tensor) -> Tensor:
    return needed.flatten(0, 1).any(0)


Needed = dict[Pair, Tensor]  # the key range [begin, end) that a pair needs, (B, Hkv, 2)


def mask(needed: Needed, rows: Rows, device: torch.device) -> Tensor | None:
    """Returns the mask of the keys of a rank that some pair needs, (B, Hkv, 2n); None if it is
    empty."""
    selected = [(pair, x.to(device)) for pair, x in needed.items() if pair.key_chunk in rows.chunks]
    selected = [(pair, x) for pair, x in selected if (x[..., 0] < x[..., 1]).any()]
    if not selected:
        return None
    j = torch.arange(rows.n, device=device)
    taken = selected[0][1].new_zeros((*selected[0][1].shape[:2], 2 * rows.n), dtype=torch.bool)
    for pair, x in selected:
        taken[..., rows.of(pair.key_chunk)] |= (x[..., :1] <= j) & (j < x[..., 1:])
    return taken


def plan_of(taken: Tensor, pair: Pair, heads: int) -> Tensor:
    """Returns the plan (skipping.plans) in which all queries of a head have the same key range."""
    per_head = taken.repeat_interleave(heads // taken.shape[1], 1).int()
    plan = per_head.movedim(-1, 0)[..., None].expand(-1, -1, -1, query_tiles(pair.n))
    return plan.contiguous()
