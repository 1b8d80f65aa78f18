"""Theoretical receptive fields: how far a bias looks, whatever the content (Qin et al., 2023)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from .convergence import Curve, has_finite_sum, logarithmic_exponents

_EXACT = 14  # distances below 2^14 are summed one by one, those beyond from NODES an octave
_NODES = 32
_LAST = 1000  # the octave at which double precision ends, nearly


@dataclass(frozen=True, eq=False)
class Tail:
    """What the exponentials of a bias sum to, from each of some distances on.

    Whether the sum is finite is judged as `convergence` says. It is exact below 16384, and a smooth
    b is assumed beyond.
    """

    distances: Tensor  # (n,) float64, from 0 on, each larger than the one before
    log_terms: Tensor  # the bias at these, (heads, n) float64
    log_sums: Tensor  # log of the sum of exp(b(d)) over d from these on, (heads, n) float64
    is_finite: Tensor  # whether there is such a sum, (heads,)

    @property
    def log_shares(self) -> Tensor:
        """log of the share of each distance in the whole sum, (heads, n)."""
        return self.log_terms - self.log_sums[:, :1]

    @property
    def log_rests(self) -> Tensor:
        """log of the share of this distance and all beyond, (heads, n)."""
        return self.log_sums - self.log_sums[:, :1]

    def receptive_field(self, eps: float) -> Tensor:
        """The smallest w for which the sum over d >= w is below eps of that over d >= 0, (heads,).

        It is infinite where the sum is.
        """
        check_share("eps", eps)
        small = self.log_rests < math.log(eps)
        field = self.distances[small.double().argmax(1)]
        return torch.where(small.any(1) & self.is_finite, field, torch.inf)


def tail(curve: Curve, device: torch.device | None = None) -> Tail:
    """Of a curve that takes distances (n,) in float64 to logits (heads, n)."""
    nearest = torch.arange(2**_EXACT, dtype=torch.float64, device=device)
    near = curve(nearest)
    nodes = torch.arange(_NODES * (_LAST - _EXACT) + 1, dtype=torch.float64, device=device)
    octaves = _EXACT + nodes / _NODES
    far = curve(torch.exp2(octaves))
    condensed = octaves * math.log(2) + far

    # Beyond the last octave the terms 2^k exp(b(2^k)) fall like k^-slope.
    slope = (condensed[:, -1 - _NODES] - condensed[:, -1]) * _LAST
    rest = condensed[:, -1] + math.log(_LAST) - torch.log(slope - 1)

    # The integral of exp(b) over the logarithm of d, by trapezoids; then sums from each d on.
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


def check_share(name: str, share: float) -> None:
    """Refuses what is not in (0, 1)."""
    if not isinstance(share, Real) or isinstance(share, bool):
        raise TypeError(f"{name} is {share!r}; it must be a number in (0, 1)")
    if not 0 < share < 1:
        raise ValueError(f"{name} is {share}; it must be a number in (0, 1)")
