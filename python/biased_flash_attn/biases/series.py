"""Biases whose exponentials are the terms of a series (Qin et al., 2023), the same in every head.

A transformer extrapolates if the series converges, as those of Type 1 and Type 2 do. The other two
diverge slowly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import DistanceBias


class Type1(DistanceBias):
    """exp b = 1/n^2, n = |d| + 1: b(d) = -2 ln(1 + |d|)."""

    fixed = True

    def formula(self, d: Tensor) -> Tensor:
        return -2 * torch.log1p(d.abs())


class Type2(DistanceBias):
    """exp b = exp(-ln^2 n), n = |d| + 1: b(d) = -ln^2(1 + |d|)."""

    fixed = True

    def formula(self, d: Tensor) -> Tensor:
        return -torch.log1p(d.abs()).square()


class InverseDistance(DistanceBias):
    """exp b = 1/n, n = |d| + 1: b(d) = -ln(1 + |d|)."""

    fixed = True

    def formula(self, d: Tensor) -> Tensor:
        return -torch.log1p(d.abs())


class InverseLogDistance(DistanceBias):
    """exp b = 1/(n ln n): b(d) = -ln(n ln n), n = |d| + 3, where the paper's sum begins."""

    fixed = True

    def formula(self, d: Tensor) -> Tensor:
        n = d.abs() + 3
        return -torch.log(n * torch.log(n))
