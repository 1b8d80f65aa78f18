"""Errors of approximate instructions stay within those of the PTX ISA, but not far below."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.emulator.tests.kernels import evaluate

# Slightly less, so that rounding to f32 does not exceed them.
TWO_PI, HUNDRED_PI = 6.28318, 314.159


def units_in_last_place(exact: np.ndarray) -> np.ndarray:
    return np.ldexp(1.0, np.maximum(np.frexp(exact)[1] - 24, -149))


def uniform(low: float, high: float) -> np.ndarray:
    return np.random.uniform(low, high, 20000).astype(np.float32)


def positive() -> np.ndarray:
    """Numbers of any exponent."""
    return np.random.randint(0x00800000, 0x7F800000, 20000).astype(np.uint32).view(np.float32)


def bound_of_logarithm(x: np.ndarray, exact: np.ndarray) -> np.ndarray:
    return 2.0**-22 * np.where((x > 0.5) & (x < 2), 1, np.abs(exact))


# Function, exact function, arguments, and the largest error: of x and the exact result.
CASES = {
    "ex2": ("ex2", np.exp2, lambda: uniform(-126, 128), lambda x, y: 2 * units_in_last_place(y)),
    "small": ("ex2", np.exp2, lambda: uniform(-1, 1), lambda x, y: 2 * units_in_last_place(y)),
    "lg2": ("lg2", np.log2, positive, bound_of_logarithm),
    "lg2 near 1": ("lg2", np.log2, lambda: uniform(0.51, 1.99), lambda x, y: 2.0**-22),
    "rcp": ("rcp", lambda x: 1 / x, positive, lambda x, y: units_in_last_place(y)),
    "sqrt": ("sqrt", np.sqrt, positive, lambda x, y: 2.0**-23 * y),
    "rsqrt": ("rsqrt", lambda x: 1 / np.sqrt(x), positive, lambda x, y: 2.0**-22.9 * y),
    "sin": ("sin", np.sin, lambda: uniform(-TWO_PI, TWO_PI), lambda x, y: 2.0**-20.5),
    "cos": ("cos", np.cos, lambda: uniform(-TWO_PI, TWO_PI), lambda x, y: 2.0**-20.5),
    "sin far": ("sin", np.sin, lambda: uniform(7, HUNDRED_PI), lambda x, y: 2.0**-14.7),
    "cos far": ("cos", np.cos, lambda: uniform(7, HUNDRED_PI), lambda x, y: 2.0**-14.7),
    "tanh": ("tanh", np.tanh, lambda: uniform(-4, 4), lambda x, y: 2.0**-11 * np.abs(y)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_errors_are_within_their_bound_and_reach_half_of_it(case):
    name, exact_of, arguments, bound_of = CASES[case]
    x = arguments()
    found = evaluate(
        f"{name}.approx.f32 %d, %a;", np.float32, x.view(np.uint32), approximation_seed=5
    )
    exact = exact_of(x.astype(np.float64))
    relative = (found - exact) / bound_of(x, exact)
    assert np.abs(relative).max() <= 1
    assert relative.max() > 0.5
    assert relative.min() < -0.5


@pytest.mark.parametrize("form", ["div.full.f32", "div.approx.f32"])
def test_quotients_are_within_two_units_in_the_last_place(form):
    a = uniform(-100, 100)
    b = np.where(np.random.rand(a.size) < 0.5, uniform(1, 2), uniform(-1e6, 1e6)).astype(np.float32)
    found = evaluate(f"{form} %d, %a, %b;", np.float32, a.view(np.uint32), b.view(np.uint32))
    exact = a.astype(np.float64) / b
    relative = (found - exact) / (2 * units_in_last_place(exact))
    assert np.abs(relative).max() <= 1
    assert relative.max() > 0.5
    assert relative.min() < -0.5


@pytest.mark.parametrize("form", ["ex2.approx.ftz.f32 %d, %a;", "div.full.f32 %d, %a, %a;"])
def test_errors_are_determined_by_their_own_seed(form):
    x = uniform(-8, 8).view(np.uint32)

    def results(seed: int, approximation_seed: int) -> np.ndarray:
        return evaluate(form, np.uint32, x, seed=seed, approximation_seed=approximation_seed)

    first = results(1, 1)
    for seed in (1, 2, 3):
        np.testing.assert_array_equal(first, results(seed, 1))
        assert 0.2 < (first != results(seed, 2)).mean() < 1


INF, NAN, LEAST = math.inf, math.nan, 2.0**-149
SPECIAL = {
    "ex2": [(-INF, 0.0), (-0.0, 1.0), (0.0, 1.0), (INF, INF), (NAN, NAN), (-200.0, 0.0)],
    "lg2": [(-INF, NAN), (-1.0, NAN), (-0.0, -INF), (0.0, -INF), (INF, INF), (NAN, NAN)],
    "rcp": [(-INF, -0.0), (-0.0, -INF), (0.0, INF), (INF, 0.0), (NAN, NAN)],
    "sqrt": [(-INF, NAN), (-1.0, NAN), (-0.0, -0.0), (0.0, 0.0), (INF, INF), (NAN, NAN)],
    "rsqrt": [(-INF, NAN), (-1.0, NAN), (-0.0, -INF), (0.0, INF), (INF, 0.0), (NAN, NAN)],
    "sin": [(-INF, NAN), (-0.0, -0.0), (0.0, 0.0), (INF, NAN), (NAN, NAN)],
    "cos": [(-INF, NAN), (-0.0, 1.0), (0.0, 1.0), (INF, NAN), (NAN, NAN)],
    "tanh": [(-INF, -1.0), (-0.0, -0.0), (0.0, 0.0), (INF, 1.0), (NAN, NAN), (LEAST, LEAST)],
}  # fmt: skip


@pytest.mark.parametrize("name", SPECIAL)
def test_special_values_are_exact(name):
    x, expected = np.array(SPECIAL[name], np.float32).T
    found = evaluate(
        f"{name}.approx.f32 %d, %a;", np.float32, np.ascontiguousarray(x).view(np.uint32)
    )
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected) & ~np.isnan(expected))


@pytest.mark.parametrize(
    ("form", "a", "b", "expected"),
    [
        ("div.approx.f32", 1.0, 2.0**127, 0.0),  # whose reciprocal is subnormal
        ("div.approx.f32", -1.0, 2.0**127, -0.0),
        ("div.approx.f32", INF, 2.0**127, NAN),
        ("div.full.f32", 0.0, 3.0, 0.0),
        ("div.full.f32", 1.0, 0.0, INF),
        ("div.full.f32", -1.0, 0.0, -INF),
        ("div.full.f32", 0.0, 0.0, NAN),
        ("div.full.f32", 1.0, -INF, -0.0),
        ("div.full.ftz.f32", 1.0, LEAST, INF),
        ("div.full.ftz.f32", LEAST, 1.0, 0.0),
    ],
)
def test_special_quotients(form, a, b, expected):
    bits = [np.array([x], np.float32).view(np.uint32) for x in (a, b)]
    found = evaluate(f"{form} %d, %a, %b;", np.float32, *bits)
    np.testing.assert_array_equal(found, np.float32(expected))
    assert np.signbit(found[0]) == (np.signbit(expected) and not math.isnan(expected))


def test_flushing_zeroes_subnormal_arguments_and_results():
    x = np.array([-130.0, LEAST, 2.0**127], np.float32).view(np.uint32)
    assert evaluate("ex2.approx.ftz.f32 %d, %a;", np.float32, x)[0] == 0
    assert evaluate("ex2.approx.f32 %d, %a;", np.float32, x)[0] > 0
    assert evaluate("lg2.approx.ftz.f32 %d, %a;", np.float32, x)[1] == -INF
    assert evaluate("lg2.approx.f32 %d, %a;", np.float32, x)[1] < -148
    assert evaluate("rcp.approx.ftz.f32 %d, %a;", np.float32, x)[2] == 0
    assert evaluate("rcp.approx.f32 %d, %a;", np.float32, x)[2] > 0
