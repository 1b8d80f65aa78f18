"""How exact a result must be, by the rule of `biased_flash_attn.exactness`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from biased_flash_attn.exactness import compared, largest

# A result is rounded when it is stored, and once more where it is accumulated in its own dtype.
ROUNDINGS = 2
# float64 results have no more exact oracle: this allows sums in a different order, but no operation
# in float32.
FLOAT64_ROUNDINGS = 1024

# Of errors to their bounds, in the comparisons so far; whoever reads it clears it.
ratios: list[float] = []


def assert_close_to_float64(
    actual: Tensor, exact: Tensor, naive: Tensor | None, what: str, terms: Tensor
) -> None:
    """The error of actual is at most twice that of naive arithmetic in its dtype, plus a rounding.

    exact is the float64 result, and naive the result of naive arithmetic in the dtype of actual, or
    None if that is float64. Errors are the largest of the tensor; NaN and infinities must be at the
    same places as in exact. Where naive arithmetic overflows, its error says nothing.

    terms is the sum of the absolute values of each result's terms. If they cancel, as in the
    gradient of a query that sees one key, each term is still rounded, while the naive error may
    happen to be 0.
    """
    assert actual.shape == exact.shape, f"{what}: shape {actual.shape}, expected {exact.shape}"
    assert exact.dtype == torch.float64
    dtype, actual, exact = actual.dtype, actual.detach().double(), exact.detach()
    finite = exact.isfinite()
    matches = torch.equal(actual.isfinite(), finite) and torch.equal(
        actual[~finite].nan_to_num(), exact[~finite].nan_to_num()
    )
    assert matches, f"{what}: NaN or infinities differ from those of the float64 result"

    roundings = FLOAT64_ROUNDINGS if dtype == torch.float64 else ROUNDINGS
    terms = terms.detach().double().expand_as(exact)[finite]
    size = largest(exact[finite]) + largest(terms) / 2
    naive = exact if naive is None else naive.detach().double()
    naive = torch.where(naive.isfinite(), naive, exact)
    of_finite = (x[finite] for x in (actual, exact, naive))
    error, bound = map(
        float, compared(*of_finite, size, dtype, roundings=roundings, float32_roundings=0)
    )
    assert math.isfinite(size * bound), f"{what}: no bound follows from terms of {size:.3g}"
    ratios.append(error / bound)
    assert error <= bound, f"{what}: error {error:.3g} of the size {size:.3g}, allowed {bound:.3g}"


# The difference of two float32 computations of one model, relative to the largest result.
FLOAT32_MODELS = 1e-5


def assert_same_model(
    actual: Tensor, expected: Tensor, what: str, made_of: Tensor | None = None
) -> None:
    """Both are float32 results of one model, computed in different ways.

    made_of, for results that are small differences, contains the terms of the differences.
    """
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    error, size = largest(actual - expected), largest(expected if made_of is None else made_of)
    assert error <= FLOAT32_MODELS * size, f"{what}: error {error:.3g}, largest {size:.3g}"
