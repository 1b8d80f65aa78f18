"""How results are compared with float64, in the commands, the benchmarks and the tests.

The error of a result may be at most twice that of naive attention in the same dtype, plus a band
for rounding. Errors are relative to a size of the result that includes its terms: a sum with
cancellation cannot be more accurate than its terms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# Of a float32 accumulator, for a gradient of a parameter: it sums signed terms of all pairs, which
# largely cancel.
SUM_ROUNDINGS = 64


@dataclass(frozen=True)
class Sums:
    """Results that are sums of terms, and the sums of the absolute values of these terms, by name.
    Both are float64."""

    values: dict[str, Tensor]
    magnitudes: dict[str, Tensor]


def summed(parts: Iterable[dict[str, Tensor]]) -> Sums:
    """Sums the contributions to each result."""
    sums = Sums({}, {})
    for part in parts:
        for name, t in part.items():
            t = t.double()
            sums.values[name] = sums.values.get(name, 0) + t
            sums.magnitudes[name] = sums.magnitudes.get(name, 0) + t.abs()
    return sums


def largest(x: Tensor) -> Tensor:
    """The largest absolute value, or 0 if there is no value."""
    return x.abs().amax() if x.numel() else x.new_zeros(())


def compared(
    found: Tensor,
    exact: Tensor,
    naive: Tensor,
    size: Tensor,
    dtype: torch.dtype,
    *,
    maxima: Callable[[Tensor], Tensor] = largest,
    roundings: int = 1,
    float32_roundings: int = SUM_ROUNDINGS,
) -> tuple[Tensor, Tensor]:
    """Returns the errors of a result and their bounds, relative to its size.

    found: the result of the code that is checked. exact: the result in float64. naive: the result
    of naive attention in `dtype`. size: of the result, one number for each of the maxima. maxima:
    reduces a tensor to its largest absolute values. The band consists of `roundings` of the result
    to `dtype` and, for results that sum many terms in another order than naive attention does,
    `float32_roundings` of a float32 accumulator.
    """
    size = size.clamp(min=sys.float_info.min)
    error, naive_error = (maxima(x.double() - exact) / size for x in (found, naive))
    band = roundings * torch.finfo(dtype).eps + float32_roundings * torch.finfo(torch.float32).eps
    return error, 2 * naive_error + band
