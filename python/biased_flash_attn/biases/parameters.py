"""Checks and ranges of the parameters of biases."""

from __future__ import annotations

import math
from numbers import Real

from torch import Tensor


def positive(parameter: Tensor, most: float | None = None) -> Tensor:
    """The parameter in float64, clamped to [0.01, most], with straight-through gradients.

    The authors of KERPLE clamp the stored values, which also preserves gradients at the limit, so
    that a head at the limit can recover.
    """
    unclamped = parameter.double()
    return unclamped + (unclamped.clamp(0.01, most) - unclamped).detach()


def positive_int(name: str, value: int) -> int:
    """Returns value, or raises an error that names the argument."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if value <= 0:
        raise ValueError(f"{name} must be positive, not {value}")
    return value


def finite(name: str, value: float) -> float:
    """Returns value, or raises an error that names the argument."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, not {value}")
    return float(value)
