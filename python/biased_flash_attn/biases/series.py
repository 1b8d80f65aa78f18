"""Biases whose exponentials are the terms of a series (Qin et al., 2023).

Those of Type 1 and Type 2 converge; the other two diverge slowly. What follows from that, and what
does not, is in docs/biases/index.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .distance import DistanceBias
from .slopes import check_slopes, slope_values


class SeriesBias(DistanceBias):
    """The same bias in every head or, with slopes, one whose distance is scaled per head.

    slopes is None, "alibi" or "geometric" (see `ALiBi`), or one nonnegative number per head.
    """

    fixed = True

    def __init__(self, num_heads: int, *, slopes: str | Sequence[float] | Tensor | None = None):
        super().__init__(num_heads)
        self.slopes = None if slopes is None else check_slopes(slopes, num_heads)
        if isinstance(self.slopes, tuple) and min(self.slopes) < 0:
            raise ValueError(f"slopes has {min(self.slopes)}; it must have no negative number")

    def formula(self, d: Tensor) -> Tensor:
        if self.slopes is None:
            return self.term(d.abs())
        k = slope_values(self.slopes, self.num_heads, d.device)[:, None]
        return self.scaled_term(k * d.abs())

    def term(self, d: Tensor) -> Tensor:
        """The bias at distance d >= 0."""
        raise NotImplementedError(f"{type(self).__name__} must define term(d)")

    def scaled_term(self, d: Tensor) -> Tensor:
        """The bias at distance d >= 0, multiplied by a slope."""
        return self.term(d)


class Type1(SeriesBias):
    """exp b = 1/n^2, n = |d| + 1: b(d) = -2 ln(1 + |d|). With slopes k, b(d) = -ln(1 + (k d)^2)."""

    def term(self, d: Tensor) -> Tensor:
        return -2 * torch.log1p(d)

    def scaled_term(self, d: Tensor) -> Tensor:
        # ln(1 + d^2), whose square would overflow at the distances that `convergence` evaluates.
        return -2 * torch.hypot(d, torch.ones_like(d)).log()


class Type2(SeriesBias):
    """exp b = exp(-ln^2 n), n = |d| + 1: b(d) = -ln^2(1 + |d|). With slopes k, b(d) =
    -ln^2(3 + k |d|)."""

    def term(self, d: Tensor) -> Tensor:
        return -torch.log1p(d).square()

    def scaled_term(self, d: Tensor) -> Tensor:
        return -torch.log(3 + d).square()


class InverseDistance(SeriesBias):
    """exp b = 1/n, n = |d| + 1: b(d) = -ln(1 + |d|). With slopes k, b(d) = -ln(1 + k |d|)."""

    def term(self, d: Tensor) -> Tensor:
        return -torch.log1p(d)


class InverseLogDistance(SeriesBias):
    """exp b = 1/(n ln n): b(d) = -ln(n ln n), n = |d| + 3, where the paper's sum begins. With
    slopes k, n = k |d| + 3."""

    def term(self, d: Tensor) -> Tensor:
        n = d + 3
        return -torch.log(n * torch.log(n))
