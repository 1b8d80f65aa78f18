"""Theoretical receptive fields: the range of a bias for any content (Qin et al., 2023)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from .convergence import Curve, has_finite_sum, logarithmic_exponents

_EXACT = 14  # distances below 2^14 are summed one by one, larger ones by quadrature
_NODES = 32  # of the quadrature, per octave
_LAST = 1000  # the last octave, close to the largest float64


@dataclass(frozen=True, eq=False)
class Tail:
    """Tail sums of the exponentials of a bias.

    Whether the sum is finite is decided by `convergence`. Sums are exact below 16384; beyond, b is
    assumed to be smooth.
    """

    distances: Tensor  # (n,) float64, increasing from 0
    log_terms: Tensor  # the bias at these distances, (heads, n) float64
    log_sums: Tensor  # log of the sum of exp(b(d)) from each distance on, (heads, n) float64
    is_finite: Tensor  # whether the sum is finite, (heads,)

    @property
    def log_fractions(self) -> Tensor:
        """log of the fraction of the whole sum at each distance, (heads, n)."""
        return self.log_terms - self.log_sums[:, :1]

    @property
    def log_tail_fractions(self) -> Tensor:
        """log of the fraction of the whole sum from each distance on, (heads, n)."""
        return self.log_sums - self.log_sums[:, :1]

    def receptive_field(self, eps: float) -> Tensor:
        """The smallest w such that the sum over d >= w is below eps of the whole sum, (heads,).

        It is infinite if the sum is infinite.
        """
        check_fraction("eps", eps)
        small = self.log_tail_fractions < math.log(eps)
        field = self.distances[small.double().argmax(1)]
        return torch.where(small.any(1) & self.is_finite, field, torch.inf)


def tail(curve: Curve, device: torch.device | None = None) -> Tail:
    """The tail sums of a curve, from distances (n,) in float64 to logits (heads, n)."""
    nearest = torch.arange(2**_EXACT, dtype=torch.float64, device=device)
    near = curve(nearest)
    nodes = torch.arange(_NODES * (_LAST - _EXACT) + 1, dtype=torch.float64, device=device)
    octaves = _EXACT + nodes / _NODES
    far = curve(torch.exp2(octaves))
    condensed = octaves * math.log(2) + far

    # Beyond the last octave the terms 2^k exp(b(2^k)) decay like k^-slope.
    slope = (condensed[:, -1 - _NODES] - condensed[:, -1]) * _LAST
    rest = condensed[:, -1] + math.log(_LAST) - torch.log(slope - 1)

    # The integral of exp(b) over log d by the trapezoidal rule, then the sums from each d on.
    panels = torch.logaddexp(condensed[:, 1:], condensed[:, :-1]) + math.log(
        math.log(2) / _NODES / 2
    )
    terms = torch.cat([near, panels, rest[:, None]], 1).nan_to_num(
        -torch.inf, torch.inf, -torch.inf
    )
    return Tail(
        distances=torch.cat([nearest, torch.exp2(octaves)]),
        log_terms=torch.cat([near, far], 1),
        log_sums=terms.flip(-1).logcumsumexp(-1).flip(-1),
        is_finite=has_finite_sum(logarithmic_exponents(curve, device)),
    )


def check_fraction(name: str, fraction: float) -> None:
    """Raises TypeError or ValueError for anything but a number in (0, 1)."""
    if not isinstance(fraction, Real) or isinstance(fraction, bool):
        raise TypeError(f"{name} is {fraction!r}; it must be a number in (0, 1)")
    if not 0 < fraction < 1:
        raise ValueError(f"{name} is {fraction}; it must be a number in (0, 1)")
