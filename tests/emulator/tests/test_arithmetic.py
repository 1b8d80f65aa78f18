"""Arithmetic of the emulator on floats, against exact rational numbers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tests.emulator.tests.kernels import assert_same_floats, evaluate, pairs, special_floats
from tests.emulator.tests.number_formats import FORMATS, decoded, rounded

TYPES = ["f16", "bf16", "f32", "f64"]
SMALLEST_NORMAL = {"f16": 2.0**-14, "f32": 2.0**-126}
NATIVE = {"f32": np.float32, "f64": np.float64}


@pytest.fixture(autouse=True)
def signalling_nan():
    with np.errstate(all="ignore"):
        yield


def decode(bits: np.ndarray, type_: str) -> np.ndarray:
    if type_ in NATIVE:
        return bits.view(NATIVE[type_]).astype(np.float64)
    return decoded(bits, type_)


def near_each_other(type_: str, count: int, n: int) -> list[np.ndarray]:
    """Random operands with similar exponents, so that no term is absorbed by another."""
    f = FORMATS[type_]
    out = []
    for _ in range(count):
        exponent = np.random.randint(f.bias - 6, f.bias + 6, n)
        mantissa = np.random.randint(0, 2 ** (f.digits - 1), n)
        sign = np.random.randint(0, 2, n) << (f.width - 1) if f.width < 64 else 0
        out.append((exponent << (f.digits - 1) | mantissa | sign).astype(f.unsigned))
    return out


def operands(type_: str, count: int) -> list[np.ndarray]:
    special = special_floats(type_)
    drawn = pairs(special if count < 3 else np.random.permutation(special)[:12], 1500, count)
    near = near_each_other(type_, count, 1500)
    return [np.concatenate(x) for x in zip(drawn, near, strict=True)]


def exactly(f, type_: str, *xs: np.ndarray) -> np.ndarray:
    """f of each element in exact arithmetic, rounded once."""
    plain = f(*(x.astype(np.longdouble) for x in xs)).astype(float)  # no product overflows
    finite = np.all([np.isfinite(x) for x in xs], axis=0)
    out = []
    for i, ok in enumerate(finite.tolist()):
        exact = f(*(Fraction(x[i]) for x in xs)) if ok else 0
        # Nonfinite results and the sign of zero do not depend on the format.
        out.append(rounded(exact, type_) if exact else 0 * plain[i] if ok else plain[i])
    return np.array(out)


def add(a, b):
    return a + b


def subtract(a, b):
    return a - b


def multiply(a, b):
    return a * b


def multiply_and_add(a, b, c):
    return a * b + c


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize(("name", "f"), [("add", add), ("sub", subtract), ("mul", multiply)])
def test_sums_and_products_are_rounded_once(name, f, type_):
    a, b = operands(type_, 2)
    found = decode(evaluate(f"{name}.rn.{type_} %d, %a, %b;", a.dtype, a, b), type_)
    assert_same_floats(found, exactly(f, type_, decode(a, type_), decode(b, type_)), a, b)


@pytest.mark.parametrize("name", ["fma.rn", "mad.rn"])
@pytest.mark.parametrize("type_", TYPES)
def test_fused_products_and_sums_are_rounded_once(name, type_):
    if name == "mad.rn" and type_.endswith("16"):
        name = "fma.rn"
    a, b, c = operands(type_, 3)
    found = decode(evaluate(f"{name}.{type_} %d, %a, %b, %c;", a.dtype, a, b, c), type_)
    expected = exactly(multiply_and_add, type_, *(decode(x, type_) for x in (a, b, c)))
    assert_same_floats(found, expected, a, b, c)


def test_fused_sums_of_bf16_are_not_rounded_twice():
    # 1.0039... * 1 is halfway between two bf16 numbers, and the summand decides.
    a, b = np.array([0x3F81] * 4, np.uint16), np.array([0x3FFF] * 4, np.uint16)
    c = np.array([0x0080, 0x8080, 0x2F80, 0xAF80], np.uint16)
    found = decode(evaluate("fma.rn.bf16 %d, %a, %b, %c;", np.uint16, a, b, c), "bf16")
    halfway = np.array([0x3F80, 0x3F80, 0x3F80, 0x3F80], np.uint16)
    tie = np.array([0x3B80] * 4, np.uint16)  # half a unit of 1
    found_of_tie = decode(
        evaluate("fma.rn.bf16 %d, %a, %b, %c;", np.uint16, halfway, tie, c), "bf16"
    )
    for result, x, y in ((found, a, b), (found_of_tie, halfway, tie)):
        expected = exactly(multiply_and_add, "bf16", *(decode(v, "bf16") for v in (x, y, c)))
        assert_same_floats(result, expected, x, y, c)


@pytest.mark.parametrize("type_", ["f16x2", "bf16x2", "f32x2"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma", "min", "max"])
def test_packed_forms_equal_scalar_ones(name, type_):
    one = type_.removesuffix("x2")
    count = 3 if name == "fma" else 2
    if name in ("min", "max"):
        if type_ == "f32x2":
            return  # no such form in PTX
        rounding = ""
    else:
        rounding = ".rn"
    low, high = (operands(one, count) for _ in range(2))
    width = FORMATS[one].width
    n = min(low[0].size, high[0].size)
    wide = f"u{width // 4}"
    packed = [y[:n].astype(wide) << width | x[:n] for x, y in zip(low, high, strict=True)]
    registers = ", ".join(f"%{r}" for r in "dabc"[: count + 1])
    found = evaluate(f"{name}{rounding}.{type_} {registers};", wide, *packed)
    for part, xs in ((found, low), (found >> width, high)):
        scalar = evaluate(
            f"{name}{rounding}.{one} {registers};", f"u{width // 8}", *(x[:n] for x in xs)
        )
        np.testing.assert_array_equal(part.astype(scalar.dtype), scalar)


@pytest.mark.parametrize("type_", ["f16", "f32"])
@pytest.mark.parametrize(
    ("name", "f"), [("add", add), ("mul", multiply), ("fma", multiply_and_add)]
)
def test_flushing_zeroes_subnormal_operands_and_results(name, f, type_):
    count = 3 if name == "fma" else 2
    bits = operands(type_, count)
    registers = ", ".join(f"%{r}" for r in "dabc"[: count + 1])
    found = decode(evaluate(f"{name}.rn.ftz.{type_} {registers};", bits[0].dtype, *bits), type_)

    def flush(x):
        return np.where(np.abs(x) < SMALLEST_NORMAL[type_], np.copysign(0.0, x), x)

    expected = flush(exactly(f, type_, *(flush(decode(x, type_)) for x in bits)))
    assert_same_floats(found, expected, *bits)


@pytest.mark.parametrize("type_", ["f16", "f32"])
def test_saturation_clamps_to_the_unit_interval(type_):
    bits = operands(type_, 3)
    found = decode(evaluate(f"fma.rn.sat.{type_} %d, %a, %b, %c;", bits[0].dtype, *bits), type_)
    exact = exactly(multiply_and_add, type_, *(decode(x, type_) for x in bits))
    np.testing.assert_array_equal(found, np.where(exact > 0, np.minimum(exact, 1), 0))
    a, b = bits[:2]
    found = decode(evaluate(f"add.rn.sat.{type_} %d, %a, %b;", a.dtype, a, b), type_)
    exact = exactly(add, type_, decode(a, type_), decode(b, type_))
    np.testing.assert_array_equal(found, np.where(exact > 0, np.minimum(exact, 1), 0))


@pytest.mark.parametrize("type_", ["f16", "bf16"])
def test_relu_clamps_fused_sums_at_zero_and_keeps_nan(type_):
    bits = operands(type_, 3)
    found = decode(evaluate(f"fma.rn.relu.{type_} %d, %a, %b, %c;", np.uint16, *bits), type_)
    exact = exactly(multiply_and_add, type_, *(decode(x, type_) for x in bits))
    np.testing.assert_array_equal(found, np.where(exact < 0, 0, exact))


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("name", ["min", "max"])
def test_extremes_prefer_numbers_to_nan_by_default(name, type_):
    a, b = operands(type_, 2)
    x, y = decode(a, type_), decode(b, type_)
    chooses = np.fmin if name == "min" else np.fmax
    plain = chooses(x, y)
    both_zero = (x == 0) & (y == 0)
    negative = np.signbit(x) | np.signbit(y) if name == "min" else np.signbit(x) & np.signbit(y)
    plain = np.where(both_zero, np.where(negative, -0.0, 0.0), plain)
    found = decode(evaluate(f"{name}.{type_} %d, %a, %b;", a.dtype, a, b), type_)
    assert_same_floats(found, plain, a, b)
    if type_ == "f64":
        return
    found = decode(evaluate(f"{name}.NaN.{type_} %d, %a, %b;", a.dtype, a, b), type_)
    assert_same_floats(found, np.where(np.isnan(x) | np.isnan(y), np.nan, plain), a, b)


def test_products_are_rounded_towards_zero():
    a, b = operands("f32", 2)
    exact = decode(a, "f32") * decode(b, "f32")
    found = decode(evaluate("mul.rz.f32 %d, %a, %b;", a.dtype, a, b), "f32")
    nearest = exact.astype(np.float32)
    too_large = np.abs(nearest.astype(np.float64)) > np.abs(exact)
    expected = np.where(too_large, np.nextafter(nearest, np.float32(0)), nearest)
    assert np.isfinite(found[np.isfinite(exact)]).all()
    assert_same_floats(found, expected.astype(np.float64), a, b)


@pytest.mark.parametrize("name", ["min", "max"])
def test_extremes_of_absolute_values_have_the_product_of_signs(name):
    a, b = operands("f32", 2)
    x, y = decode(a, "f32"), decode(b, "f32")
    extreme = getattr(np, f"{name}imum")(np.abs(x), np.abs(y))
    found = decode(evaluate(f"{name}.NaN.xorsign.abs.f32 %d, %a, %b;", a.dtype, a, b), "f32")
    assert_same_floats(found, np.copysign(1, x) * np.copysign(1, y) * extreme, a, b)


def test_extremes_of_three_operands_and_flushed_ones():
    bits = operands("f32", 3)
    x, y, z = (decode(b, "f32") for b in bits)
    found = decode(evaluate("max.f32 %d, %a, %b, %c;", np.uint32, *bits), "f32")
    np.testing.assert_array_equal(found, np.fmax(np.fmax(x, y), z))
    found = decode(evaluate("min.ftz.f32 %d, %a, %b;", np.uint32, *bits[:2]), "f32")
    assert not ((found != 0) & (np.abs(found) < SMALLEST_NORMAL["f32"])).any()


@pytest.mark.parametrize("type_", TYPES)
def test_neg_abs_and_copysign_change_only_signs(type_):
    bits = special_floats(type_)
    sign = bits.dtype.type(1 << (FORMATS[type_].width - 1))
    np.testing.assert_array_equal(evaluate(f"neg.{type_} %d, %a;", bits.dtype, bits), bits ^ sign)
    np.testing.assert_array_equal(evaluate(f"abs.{type_} %d, %a;", bits.dtype, bits), bits & ~sign)
    if type_ in NATIVE:
        a, b = pairs(bits, 100)
        found = evaluate(f"copysign.{type_} %d, %a, %b;", bits.dtype, a, b)
        np.testing.assert_array_equal(found, (a & sign) | (b & ~sign))


@pytest.mark.parametrize(("name", "f"), [("rcp", lambda x: 1 / x), ("sqrt", np.sqrt)])
@pytest.mark.parametrize("form", ["rn.f32", "rn.ftz.f32", "rn.f64"])
def test_reciprocals_and_roots_are_rounded_correctly(name, f, form):
    type_ = form[-3:]
    bits = np.concatenate(
        [
            special_floats(type_),
            *near_each_other(type_, 1, 3000),
            pairs(special_floats(type_), 3000)[0],
        ]
    )
    native = NATIVE[type_]
    smallest = np.finfo(native).tiny if ".ftz" in form else native(0)

    def flush(x):
        return np.where(np.abs(x) < smallest, np.copysign(native(0), x), x)

    with np.errstate(all="ignore"):
        expected = flush(f(flush(bits.view(native))))
    found = evaluate(f"{name}.{form} %d, %a;", bits.dtype, bits).view(native)
    assert_same_floats(found, expected, bits)


@pytest.mark.parametrize("type_", ["f32", "f64"])
def test_quotients_are_rounded_correctly(type_):
    a, b = operands(type_, 2)
    with np.errstate(all="ignore"):
        expected = a.view(NATIVE[type_]) / b.view(NATIVE[type_])
    found = evaluate(f"div.rn.{type_} %d, %a, %b;", a.dtype, a, b).view(NATIVE[type_])
    assert_same_floats(found, expected, a, b)


COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


@pytest.mark.parametrize("type_", TYPES)
def test_comparisons_of_floats_handle_nan(type_):
    a, b = pairs(special_floats(type_), 300)
    x, y = decode(a, type_), decode(b, type_)
    nan = np.isnan(x) | np.isnan(y)
    for name, compare in COMPARISONS.items():
        ordered = compare(x, y) & ~nan
        for suffix, expected in (("", ordered), ("u", ordered | nan)):
            found = evaluate(f"setp.{name}{suffix}.{type_} %p, %a, %b;", bool, a, b)
            np.testing.assert_array_equal(found, expected, err_msg=name + suffix)
    for name, expected in (("num", ~nan), ("nan", nan)):
        found = evaluate(f"setp.{name}.{type_} %p, %a, %b;", bool, a, b)
        np.testing.assert_array_equal(found, expected, err_msg=name)


@pytest.mark.parametrize("type_", ["f16", "f32"])
def test_flushed_comparisons_treat_subnormals_as_zeros(type_):
    a, b = pairs(special_floats(type_), 10)
    x, y = (
        np.where(np.abs(v) < SMALLEST_NORMAL[type_], 0, v)
        for v in (decode(a, type_), decode(b, type_))
    )
    found = evaluate(f"setp.lt.ftz.{type_} %p, %a, %b;", bool, a, b)
    np.testing.assert_array_equal(found, x < y)
