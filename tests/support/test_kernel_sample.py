"""The sample of the tests of GPU kernels, from tests that stand in for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace

import pytest

from tests.support.cases import Case
from tests.support.kernel_sample import DTYPES, sample

BIASES = "linear", "cumulative"


@dataclass(eq=False)
class Item:
    """What a sample depends on of a test."""

    function: str
    parameters: dict = field(default_factory=dict)
    fixturenames: tuple[str, ...] = ()
    skips: bool = False
    path: str = "test_file.py"

    @property
    def callspec(self) -> SimpleNamespace:
        return SimpleNamespace(params=self.parameters)

    def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
        yield pytest.mark.skipif(self.skips, reason="cannot run").mark


def cases(function: str, **settings) -> list[Item]:
    """A test of every bias in every dtype, each twice."""
    pairs = 2 * list(product(BIASES, DTYPES))
    return [Item(function, {"case": Case(*pair, **settings)}) for pair in pairs]


def test_every_bias_is_there_in_every_dtype_and_every_function_once():
    items = [*cases("one"), *cases("two"), *cases("two", trained=False), Item("three")]
    chosen = sample(items, None)
    found = [x.parameters["case"] for x in chosen if x.function != "three"]
    kinds = {(case.bias, case.dtype, case.trained) for case in found}
    assert kinds == set(product(BIASES, DTYPES, [True, False]))
    assert {item.function for item in chosen} == {"one", "two", "three"}
    assert len(chosen) == len(kinds) + 1


def test_parameters_may_be_in_a_dictionary():
    items = [Item("one", {"row": {"bias": "linear", "dtype": dtype}}) for dtype in DTYPES]
    assert set(sample(items, None)) == set(items)


def test_a_drawn_dtype_counts():
    drawn = Item("one", {"bias": "linear"}, fixturenames=("drawn_dtype",))
    given = [Item("one", {"bias": "linear", "dtype": dtype}) for dtype in DTYPES]
    assert len(sample([drawn, *given], None)) == len(DTYPES)


def test_what_is_skipped_covers_nothing():
    runs = Item("one")
    assert sample([Item("one", skips=True), runs], None) == [runs]


def test_a_smaller_sample_has_every_function_first():
    items = [*cases("one"), *(Item(name) for name in ("two", "three", "four"))]
    assert {item.function for item in sample(items, 4)} == {"one", "two", "three", "four"}
    assert sample(items, 4) == sample(items, None)[:4]
