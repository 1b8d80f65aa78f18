"""How large an error may be: the one rule of the commands, the benchmarks and the tests."""

from __future__ import annotations

import torch
from torch import Tensor


def error_bound(
    naive_error: float | Tensor,
    dtype: torch.dtype,
    *,
    roundings: int = 1,
    float32_roundings: int = 0,
) -> float | Tensor:
    """Returns twice the error of naive attention in dtype, plus a band for rounding.

    Errors are relative to the size of the result. The band consists of `roundings` of the result
    to dtype and, for results that sum many terms in another order than naive attention does,
    `float32_roundings` of a float32 accumulator.
    """
    band = roundings * torch.finfo(dtype).eps + float32_roundings * torch.finfo(torch.float32).eps
    return 2 * naive_error + band
