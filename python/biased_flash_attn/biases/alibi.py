"""ALiBi, attention with linear biases (Press et al., 2022)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..forms import Geometry, Linear
from .distance import PositionBias
from .parameters import finite
from .slopes import check_slopes, slope_exponents, slope_values, smallest_exponent


class ALiBi(PositionBias):
    """b(d) = -m |d|, with the slope m = 2^-h of each head falling geometrically.

    slopes="geometric" has the exponents h = 8n/H for n = 1..H. So has slopes="alibi" when H is a
    power of two; otherwise it follows the authors' code, which uses the exponents of the largest
    power of two below H, then every other one of twice that power. slopes may also be one number
    per head, whose count is then num_heads if that is None.

    shift is added to every exponent and exponent replaces them all (the slope shift and the slope
    equalization of Chi et al., 2023, section 4): larger values give flatter slopes with a longer
    range. trainable=True makes the slopes the parameter `slopes`, (num_heads,), unbounded.
    """

    def __init__(
        self,
        num_heads: int | None = None,
        *,
        slopes: str | Sequence[float] | Tensor = "alibi",
        shift: float = 0.0,
        exponent: float | None = None,
        trainable: bool = False,
    ):
        checked = check_slopes(slopes, num_heads)
        if num_heads is None and not isinstance(checked, str):
            num_heads = len(checked)
        super().__init__(num_heads)
        self.fixed_slopes = checked
        self.shift = finite("shift", shift)
        self.exponent = None if exponent is None else finite("exponent", exponent)
        self._check_exponents()
        self.fixed = not trainable
        self.slopes = None
        if trainable:
            self.slopes = nn.Parameter(torch.empty(num_heads))
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.slopes is not None:
            self.slopes.copy_(self._initial_slopes(self.slopes.device))

    def _check_exponents(self) -> None:
        if not isinstance(self.fixed_slopes, str):
            if self.shift != 0 or self.exponent is not None:
                raise ValueError("shift and exponent need named slopes; slopes has numbers")
            return
        smallest = self.exponent
        if smallest is None:
            smallest = smallest_exponent(self.fixed_slopes, self.num_heads)
        # A condition on the tensor of slopes would break the graph of torch.compile.
        if -(smallest + self.shift) >= sys.float_info.max_exp:
            raise ValueError("shift or exponent is so small that a slope is infinite")

    def _initial_slopes(self, device: torch.device | str | None = None) -> Tensor:
        """The fixed slopes, or those at initialization, (num_heads,) float64."""
        if not isinstance(self.fixed_slopes, str):
            return slope_values(self.fixed_slopes, self.num_heads, device)
        h = slope_exponents(self.fixed_slopes, self.num_heads, device)
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
