"""What the rule for exactness refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.numerics import assert_close_to_float64

NAN, INF = torch.nan, torch.inf


def check(actual: Tensor, naive: Tensor | None, terms: Tensor | None = None) -> None:
    exact = torch.tensor([1.0, 2.0, 3.0]).double()
    assert_close_to_float64(actual, exact, naive, "result", exact if terms is None else terms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("unknown", [NAN, INF])
def test_errors_are_found_where_naive_arithmetic_overflows(unknown, dtype):
    naive = torch.tensor([1.0, unknown, 3.0])
    check(torch.tensor([1.0, 2.0, 3.0], dtype=dtype), naive)
    for wrong in (2.001, NAN, INF):
        with pytest.raises(AssertionError, match="result: "):
            check(torch.tensor([1.0, wrong, 3.0], dtype=dtype), naive)


@pytest.mark.parametrize("unknown", [NAN, INF])
def test_nothing_passes_without_a_bound(unknown):
    with pytest.raises(AssertionError, match="no bound follows"):
        check(torch.ones(3), None, torch.tensor([1.0, unknown, 3.0]))
