"""The keys of a rank, and which of them others take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..chunk_pairs import Pair
from ..skipping.plans import query_tiles
from .layout import chunks_of


@dataclass(frozen=True)
class Rows:
    """Tensors (B, H, 2n, ...) or (B, H, 2n) of a rank, and which chunks these are."""

    chunks: tuple[int, int]
    n: int

    def of(self, chunk: int) -> slice:
        """Where a chunk's rows are."""
        begin = self.chunks.index(chunk) * self.n
        return slice(begin, begin + self.n)


@dataclass(frozen=True)
class Keys:
    """k and v (B, Hkv, 2n, D), and running sums (B or 1, H or 1, 2n) or None, of some rank."""

    rows: Rows
    k: Tensor
    v: Tensor
    sums: Tensor | None

    def of(self, chunk: int) -> tuple[Tensor, Tensor, Tensor | None]:
        at = self.rows.of(chunk)
        sums = None if self.sums is None else self.sums[..., at]
        return self.k[:, :, at], self.v[:, :, at], sums

    def tensors(self, needed: Tensor) -> list[tuple[str, Tensor]]:
        """What a message holds of them: those that needed (B, Hkv, 2n) shows, or some head."""
        tensors = [("keys", self.k[needed]), ("values", self.v[needed])]
        if self.sums is not None:
            tensors.append(("sums", self.sums[..., of_any_head(needed)]))
        return tensors

    def empty_tensors(self, needed: Tensor) -> list[Tensor]:
        """Room for a message of another rank."""
        count = int(needed.sum())
        tensors = [x.new_empty((count, x.shape[3])) for x in (self.k, self.v)]
        if self.sums is not None:
            shape = (*self.sums.shape[:2], int(of_any_head(needed).sum()))
            tensors.append(self.sums.new_empty(shape))
        return tensors

    def received(self, rank: int, ranks: int, needed: Tensor, tensors: list[Tensor]) -> Keys:
        """Those of another rank, of which a message held some; the others are 0."""
        k, v = torch.zeros_like(self.k), torch.zeros_like(self.v)
        k[needed], v[needed] = tensors[:2]
        sums = None
        if self.sums is not None:
            sums = torch.zeros_like(self.sums)
            sums[..., of_any_head(needed)] = tensors[2]
        return Keys(Rows(chunks_of(rank, ranks), self.rows.n), k, v, sums)


def of_any_head(needed: Tensor) -> Tensor:
    return needed.flatten(0, 1).any(0)


Needed = dict[Pair, Tensor]  # from and to before which keys a pair takes, (B, Hkv, 2)


def mask(needed: Needed, rows: Rows, device: torch.device) -> Tensor | None:
    """The keys of a rank that some pair takes, (B, Hkv, 2n); None where there are none."""
    shown = [(pair, x.to(device)) for pair, x in needed.items() if pair.key_chunk in rows.chunks]
    shown = [(pair, x) for pair, x in shown if (x[..., 0] < x[..., 1]).any()]
    if not shown:
        return None
    j = torch.arange(rows.n, device=device)
    taken = shown[0][1].new_zeros((*shown[0][1].shape[:2], 2 * rows.n), dtype=torch.bool)
    for pair, x in shown:
        taken[..., rows.of(pair.key_chunk)] |= (x[..., :1] <= j) & (j < x[..., 1:])
    return taken


def plan_of(taken: Tensor, pair: Pair, heads: int) -> Tensor:
    """The plan (skipping.plans) in which all queries of a head take the keys of its range."""
    of_heads = taken.repeat_interleave(heads // taken.shape[1], 1).int()
    plan = of_heads.movedim(-1, 0)[..., None].expand(-1, -1, -1, query_tiles(pair.n))
    return plan.contiguous()
