"""Theoretical receptive fields: how far a bias looks, whatever the content (Qin et al., 2023)."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

import torch
from torch import Tensor

_EXACT = 14  # distances below 2^14 are summed one by one, those beyond from NODES an octave
_NODES = 32
_LAST = 1000  # the octave at which double precision ends, nearly
# The terms 2^k exp(b(2^k)) fall like k^-p, and their series converges where p > 1. This leaves room
# for rounding: at p = 1 lies exp(b) = 1 / (n ln n).
_LEAST_POWER = 1.01


def receptive_field(
    curve: Callable[[Tensor], Tensor], eps: float, device: torch.device | None = None
) -> Tensor:
    """The smallest w for which the sum of exp(b(d)) over d >= w is below eps of that over d >= 0.

    curve takes distances (n,) in float64 to logits (heads, n). The result is (heads,) float64, and
    infinite where the sum over all d is. It is exact below 16384, and a smooth b is assumed beyond.

    Whether the sum is finite is decided by Cauchy's condensation: with exp(b(d)) it converges, or
    not, as the sum of 2^k exp(b(2^k)) does, for a bias that decreases.
    """
    if not isinstance(eps, Real) or isinstance(eps, bool):
        raise TypeError(f"eps is {eps!r}; it must be a number in (0, 1)")
    if not 0 < eps < 1:
        raise ValueError(f"eps is {eps}; it must be a number in (0, 1)")
    nearest = torch.arange(2**_EXACT, dtype=torch.float64, device=device)
    near = curve(nearest)
    nodes = torch.arange(_NODES * (_LAST - _EXACT) + 1, dtype=torch.float64, device=device)
    octaves = _EXACT + nodes / _NODES
    condensed = octaves * math.log(2) + curve(torch.exp2(octaves))

    middle, last = condensed[:, condensed.shape[1] // 2], condensed[:, -1]
    power = (middle - last) / math.log(_LAST / ((_LAST + _EXACT) / 2))
    slope = (condensed[:, -1 - _NODES] - last) * _LAST  # of the last octave: the same, near its end
    rest = last + math.log(_LAST) - torch.log(slope - 1)

    # The integral of exp(b) over the logarithm of d, by trapezoids; then sums from each d on.
    panels = torch.logaddexp(condensed[:, 1:], condensed[:, :-1]) + math.log(
        math.log(2) / _NODES / 2
    )
    terms = torch.cat([near, panels, rest[:, None]], 1).nan_to_num(
        -torch.inf, torch.inf, -torch.inf
    )
    beyond = terms.flip(-1).logcumsumexp(-1).flip(-1)
    small = beyond < beyond[:, :1] + math.log(eps)
    distances = torch.cat([nearest, torch.exp2(octaves)])
    field = torch.where(small.any(1), distances[small.double().argmax(1)], torch.inf)
    return torch.where(power > _LEAST_POWER, field, torch.inf)
