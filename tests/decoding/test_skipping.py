"""Decoding leaves out only what float64 agrees is worth no more than the tolerance."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.decoding.skipping_cases import (
    AT_THE_LIMIT,
    BIASES,
    CAN_GO,
    CONTENTS,
    check_bounds_of_an_earlier_bias,
    check_first_tile,
    check_infinity,
    check_tolerance,
)


@pytest.mark.sanitize
@given(
    name=st.sampled_from([*BIASES]),
    content=st.sampled_from([*CONTENTS, AT_THE_LIMIT]),
    n=st.integers(1024, 1700),
    n_query=st.integers(1, 5),
    tolerance=st.sampled_from([0.3, 1e-2, 2.0**-12, 2.0**-24]),
    page_size=st.sampled_from([16, 64, 128]),
    window=st.none() | st.just(700),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=80)
def test_skipped_mass_is_within_tolerance(
    name, content, n, n_query, tolerance, page_size, window, seed
):
    torch.manual_seed(seed)
    random.seed(seed)
    something = check_tolerance(
        name, content, (n_query, n), tolerance, page_size, window, torch.float64, "cpu"
    )
    event("something is left out" if something else "nothing shows")


@pytest.mark.parametrize("name", CAN_GO)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_distant_tiles_are_read_only_where_significant(name, dtype):
    check_first_tile(name, dtype, "cpu")


@pytest.mark.parametrize("place", ["k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_infinities_are_not_skipped(place, value):
    check_infinity(place, value, "cpu")


def test_bounds_are_those_of_the_bias():
    check_bounds_of_an_earlier_bias("cpu")
