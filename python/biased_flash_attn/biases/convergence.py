"""A numerical test of whether the sum of exp(b(d)) over all distances is finite.

If it is, the keys beyond a distance add less and less to the output of a layer as that distance
grows, for any length (theorem 3.4 of Qin et al., 2023).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Curve = Callable[[Tensor], Tensor]  # distances (n,) in float64 to logits (heads, n)

# b is evaluated at d = 2^k, almost up to the largest float64.
OCTAVES = (125, 250, 500, 1000)
# If the first exponent differs from 1 by more than this, slower factors need not be fitted: between
# the last two of these octaves a factor (ln d)^q changes the first exponent by only q / 500.
CLEAR = 0.05
# Exponents fitted to a function of this form are accurate to 1e-9.
ROUNDING = 1e-6


def logarithmic_exponents(curve: Curve, device: torch.device | None = None) -> Tensor:
    """p, q, r with exp(b(d)) like d^-p (ln d)^-q (ln ln d)^-r, (heads, 3) float64.

    They are fitted exactly to b at the distances 2^125, 2^250, 2^500 and 2^1000. Where p is clearly
    not 1, q and r are 0, and p is the decrease of b between the last two distances per unit of
    ln d; infinite where b is -inf there.
    """
    d = torch.exp2(torch.tensor(OCTAVES, dtype=torch.float64, device=device))
    b = curve(d)
    log = d.log()
    slope = (b[:, -2] - b[:, -1]) / (log[-1] - log[-2])
    slope = torch.where(b[:, -1] == -torch.inf, torch.inf, slope)
    power_only = torch.stack([slope, *[torch.zeros_like(slope)] * 2], 1)

    basis = torch.stack([-log, -log.log(), -log.log().log(), torch.ones_like(log)], 1)
    fitted = torch.linalg.solve(basis, b.nan_to_num().mT).mT[:, :3]
    return torch.where((slope - 1).abs()[:, None] > CLEAR, power_only, fitted)


def has_finite_sum(exponents: Tensor) -> Tensor:
    """Bertrand's test of (heads, 3) exponents, (heads,) bool.

    The first exponent that is not 1 decides: above 1 the sum is finite, below 1 it is infinite. If
    all three are 1, as for 1 / (n ln n ln ln n), it is infinite.
    """
    finite = torch.zeros(exponents.shape[0], dtype=torch.bool, device=exponents.device)
    for exponent in exponents.flip(1).unbind(1):
        undecided = (exponent - 1).abs() <= ROUNDING
        finite = torch.where(undecided, finite, exponent > 1)
    return finite & ~exponents.isnan().any(1)
