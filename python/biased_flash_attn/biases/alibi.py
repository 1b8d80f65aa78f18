"""ALiBi, attention with linear biases (Press et al., 2022)."""

from __future__ import annotations

import math
import sys
from numbers import Real

import torch
from torch import Tensor, nn

from ..forms import Geometry, Linear
from .base import PositionBias


class ALiBi(PositionBias):
    """b(d) = -m |d|, with the slope m = 2^-h of each head falling geometrically.

    The exponents are h = 8n/H for n = 1..H. When H is not a power of two, the authors' code uses
    those of the largest power of two below H, then every other one of twice that power.

    shift is added to every exponent and exponent replaces them all (the slope shift and the slope
    equalization of Chi et al., 2023, section 4): larger values give flatter slopes with a longer
    range. trainable=True makes the slopes the parameter `slopes`, (num_heads,), unbounded.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        shift: float = 0.0,
        exponent: float | None = None,
        trainable: bool = False,
    ):
        super().__init__(num_heads)
        self.shift = finite("shift", shift)
        self.exponent = None if exponent is None else finite("exponent", exponent)
        # A condition on the tensor of slopes would break the graph of torch.compile.
        if -(self._smallest_exponent() + self.shift) >= sys.float_info.max_exp:
            raise ValueError("shift or exponent is so small that a slope is infinite")
        self.fixed = not trainable
        self.slopes = None
        if trainable:
            self.slopes = nn.Parameter(self._initial_slopes().to(torch.get_default_dtype()))

    def _smallest_exponent(self) -> float:
        """The exponent of the steepest slope, without the shift."""
        if self.exponent is not None:
            return self.exponent
        power = 1 << (self.num_heads.bit_length() - 1)
        return 8 / power if self.num_heads == power else 4 / power

    def _initial_slopes(self, device: torch.device | str | None = None) -> Tensor:
        """The fixed slopes, or those at initialization, (num_heads,) float64."""
        power = 1 << (self.num_heads.bit_length() - 1)
        n = torch.arange(1, self.num_heads + 1, dtype=torch.float64, device=device)
        # Beyond the power P: every other exponent of 2P heads, 8 (2m - 1) / (2P) for m = 1, 2, ...
        h = 8 / power * torch.where(n <= power, n, n - power - 0.5)
        if self.exponent is not None:
            h = torch.full_like(h, self.exponent)
        return torch.exp2(-(h + self.shift))

    def lower(
        self, geometry: Geometry, dtype: torch.dtype, device: torch.device | str | None
    ) -> Linear:
        """The slopes, (1, num_heads), which do not depend on the geometry."""
        if self.slopes is not None:
            return Linear(self.slopes[None].to(dtype))
        return Linear(
            self._cached((dtype, device), lambda: self._initial_slopes(device)[None].to(dtype))
        )

    def curve(self, d: Tensor) -> Tensor:
        slopes = self._initial_slopes(d.device) if self.slopes is None else self.slopes.double()
        return -slopes[:, None] * d


def finite(name: str, value: float) -> float:
    """Returns value, or raises an error that names the argument."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, not {value}")
    return float(value)
