"""Biases read from trained tables: T5's buckets (Raffel et al., 2020) and a clipped table."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .distance import DistanceBias
from .parameters import positive_int


class T5(DistanceBias):
    """b(d) = r[bucket(d)]: one bucket for each small distance, then increasingly wide ones.

    Of n buckets, the first n/2 hold one distance each. The others grow logarithmically up to
    max_distance, and the last holds all larger distances. As in T5, keys after the query share
    bucket 0, unless bidirectional=True reserves half of the num_buckets for them.

    num_buckets must be even, with two or more for each direction, and max_distance larger than
    the number of one-distance buckets. The parameter `r` is (num_heads, num_buckets).
    """

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = False,
    ):
        super().__init__(num_heads)
        self.num_buckets = positive_int("num_buckets", num_buckets)
        self.max_distance = positive_int("max_distance", max_distance)
        self.bidirectional = bidirectional
        least = 4 if bidirectional else 2
        if num_buckets % 2 or num_buckets < least:
            raise ValueError(f"num_buckets must be even and at least {least}, not {num_buckets}")
        self.n_past = num_buckets // 2 if bidirectional else num_buckets
        self.n_exact = self.n_past // 2
        if max_distance <= self.n_exact:
            raise ValueError(f"max_distance must exceed {self.n_exact}, not {max_distance}")
        self.r = nn.Parameter(torch.empty(self.num_heads, num_buckets))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.r)

    def formula(self, d: Tensor) -> Tensor:
        return self.r.double()[:, self.bucket(d)]

    def bucket(self, d: Tensor) -> Tensor:
        """The buckets of distances d, int64 in [0, num_buckets)."""
        ahead = 0
        if self.bidirectional:
            ahead = self.n_past * (d < 0)
            d = d.abs()
        exact, n_wide = self.n_exact, self.n_past - self.n_exact
        d = d.clamp(min=0)
        wide = exact + torch.log(d / exact) / math.log(self.max_distance / exact) * n_wide
        return ahead + torch.where(d < exact, d, wide.clamp(max=self.n_past - 1)).long()


class ClippedTable(DistanceBias):
    """b(d) = r[min(|d|, max_distance)], with the table `r`, (num_heads, max_distance + 1), trained.

    Some papers call this the T5 bias (Veisi et al., 2025).
    """

    def __init__(self, num_heads: int, max_distance: int = 128):
        super().__init__(num_heads)
        self.max_distance = positive_int("max_distance", max_distance)
        self.r = nn.Parameter(torch.empty(self.num_heads, max_distance + 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.r)

    def formula(self, d: Tensor) -> Tensor:
        return self.r.double()[:, d.abs().clamp(max=self.max_distance).long()]
