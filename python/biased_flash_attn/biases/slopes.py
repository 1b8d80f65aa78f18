"""Slopes: one factor of the distance per head, as in ALiBi."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .parameters import finite

NAMES = ("alibi", "geometric")


def check_slopes(
    slopes: str | Sequence[float] | Tensor, num_heads: int | None
) -> str | tuple[float, ...]:
    """Returns a name, or one finite number per head, any number of them if num_heads is None;
    otherwise raises an error naming slopes."""
    if isinstance(slopes, str):
        if slopes not in NAMES:
            allowed = " or ".join(map(repr, NAMES))
            raise ValueError(f"slopes is {slopes!r}; it may be {allowed}, or one number per head")
        return slopes
    if isinstance(slopes, Tensor):
        slopes = slopes.detach().double().tolist()
    if not isinstance(slopes, Sequence):
        kind = type(slopes).__name__
        raise TypeError(f"slopes is a {kind}; it must be a name or one number per head")
    if num_heads is not None and len(slopes) != num_heads:
        raise ValueError(
            f"slopes has {len(slopes)} numbers; it must have one per head, {num_heads}"
        )
    return tuple(finite(f"slopes[{h}]", slope) for h, slope in enumerate(slopes))


def slope_exponents(name: str, num_heads: int, device: torch.device | str | None) -> Tensor:
    """The exponents h of slopes 2^-h, (num_heads,) float64.

    "geometric" is h = 8n/H for n = 1..H. "alibi" is the same for a power of two; for other H the
    authors' code takes those of the largest power of two P below H, then every other one of 2P.
    """
    n = torch.arange(1, num_heads + 1, dtype=torch.float64, device=device)
    if name == "geometric":
        return 8 / num_heads * n
    power = 1 << (num_heads.bit_length() - 1)
    # Every other exponent of 2P heads: 8 (2m - 1) / (2P) for m = 1, 2, ...
    return 8 / power * torch.where(n <= power, n, n - power - 0.5)


def smallest_exponent(name: str, num_heads: int) -> float:
    """The smallest of `slope_exponents`, without a tensor."""
    power = 1 << (num_heads.bit_length() - 1)
    if name == "geometric" or num_heads == power:
        return 8 / num_heads
    return 4 / power


def slope_values(
    slopes: str | tuple[float, ...], num_heads: int, device: torch.device | str | None
) -> Tensor:
    """The slopes that `check_slopes` returned, (num_heads,) float64."""
    if isinstance(slopes, str):
        return torch.exp2(-slope_exponents(slopes, num_heads, device))
    return torch.tensor(slopes, dtype=torch.float64, device=device)
