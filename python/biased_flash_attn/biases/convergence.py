"""Whether the sum of exp(b(d)) over all distances is finite, judged from numbers.

A transformer is certain to extrapolate where it is (theorem 3.4 of Qin et al., 2023).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Curve = Callable[[Tensor], Tensor]  # distances (n,) in float64 to logits (heads, n)

# b is looked at where d = 2^k, up to where double precision ends, nearly.
OCTAVES = (125, 250, 500, 1000)
# Logarithms that are this far apart tell exp(b) from 1/d without any that grow more slowly: over
# the last two octaves above, a factor (ln d)^q moves the first exponent by q / 500 only.
CLEAR = 0.05
# Exponents of such a function are found to 1e-9.
ROUNDING = 1e-6


def logarithmic_exponents(curve: Curve, device: torch.device | None = None) -> Tensor:
    """p, q and r for which exp(b(d)) falls like d^-p (ln d)^-q (ln ln d)^-r, (heads, 3) float64.

    They are fitted exactly to b at the distances 2^125, 2^250, 2^500 and 2^1000. Where exp(b) does
    not fall like that and p is clearly not 1, q and r are 0, and p is how b falls from one of the
    last two distances to the other, for each unit of ln d; infinite where b is -inf there.
    """
    d = torch.exp2(torch.tensor(OCTAVES, dtype=torch.float64, device=device))
    b = curve(d)
    log = d.log()
    steepness = (b[:, -2] - b[:, -1]) / (log[-1] - log[-2])
    steepness = torch.where(b[:, -1] == -torch.inf, torch.inf, steepness)
    alone = torch.stack([steepness, *[torch.zeros_like(steepness)] * 2], 1)

    basis = torch.stack([-log, -log.log(), -log.log().log(), torch.ones_like(log)], 1)
    fitted = torch.linalg.solve(basis, b.nan_to_num().mT).mT[:, :3]
    return torch.where((steepness - 1).abs()[:, None] > CLEAR, alone, fitted)


def has_finite_sum(exponents: Tensor) -> Tensor:
    """Bertrand's test of (heads, 3) exponents, (heads,) bool.

    The first exponent that is not 1 decides: above 1 the sum is finite, below it is not. With all
    three at 1, as of 1 / (n ln n ln ln n), it is not.
    """
    finite = torch.zeros(exponents.shape[0], dtype=torch.bool, device=exponents.device)
    for exponent in exponents.flip(1).unbind(1):
        undecided = (exponent - 1).abs() <= ROUNDING
        finite = torch.where(undecided, finite, exponent > 1)
    return finite & ~exponents.isnan().any(1)
