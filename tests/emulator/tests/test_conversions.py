"""Conversions of the emulator against an independent model of the number formats."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tests.emulator.tests.kernels import (
    assert_same_floats,
    evaluate,
    pairs,
    special_floats,
    special_integers,
)
from tests.emulator.tests.number_formats import FORMATS, decoded, encoded, rounded

ALL_OF_16_BITS = np.arange(2**16, dtype=np.uint16)
INTEGERS = [f"{kind}{width}" for kind in "us" for width in (8, 16, 32, 64)]


@pytest.fixture(autouse=True)
def signalling_nan():
    with np.errstate(all="ignore"):
        yield


def integers(end: int, n: int, dtype: str) -> np.ndarray:
    return np.random.default_rng(np.random.randint(2**31)).integers(0, end, n, dtype)


def bits_of_floats(type_: str) -> np.ndarray:
    width = FORMATS[type_].width
    drawn = np.random.randint(0, 2**32, 20000, np.uint64) << 32 | np.random.randint(
        0, 2**32, 20000, np.uint64
    )
    unsigned = f"u{width // 8}"
    # Also numbers of moderate size, including integers and ties.
    near = (np.random.randint(-600, 600, 4000) / 4).astype(
        {16: np.float16, 32: np.float32, 64: np.float64}[width]
    )
    if type_ == "bf16":
        near = (near.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    powers = np.ldexp(1.0, np.arange(-70, 70))
    near = np.concatenate(
        [
            near.view(unsigned),
            *(encode(sign * powers * f, type_) for sign in (1, -1) for f in (1, 0.75, 1.5)),
        ]
    )
    return np.concatenate([special_floats(type_), near, (drawn >> (64 - width)).astype(unsigned)])


def encode(x: np.ndarray, type_: str) -> np.ndarray:
    if type_ in ("f32", "f64"):
        native = np.float32 if type_ == "f32" else np.float64
        return x.astype(native).view(f"u{np.dtype(native).itemsize}")
    return encoded(x, type_).astype(FORMATS[type_].unsigned)


def decode(bits: np.ndarray, type_: str) -> np.ndarray:
    if type_ in ("f32", "f64"):
        return bits.view(np.float32 if type_ == "f32" else np.float64).astype(np.float64)
    return decoded(bits, type_)


def assert_same_codes(found: np.ndarray, expected: np.ndarray, x: np.ndarray, type_: str) -> None:
    """The bits are equal, or both NaN if x is NaN."""
    number = ~np.isnan(x)
    wrong = np.flatnonzero(number & (found.astype(np.int64) != expected))
    assert not wrong.size, (wrong.size, x[wrong[0]], hex(found[wrong[0]]), hex(expected[wrong[0]]))
    assert np.isnan(decoded(found, type_)[~number]).all()


@pytest.mark.parametrize("to", ["f32", "f64"])
@pytest.mark.parametrize("of", ["f16", "bf16"])
def test_every_16_bit_float_widens_exactly(of, to):
    found = evaluate(f"cvt.{to}.{of} %d, %a;", FORMATS[to].unsigned, ALL_OF_16_BITS)
    expected = decoded(ALL_OF_16_BITS, of)
    assert_same_floats(decode(found, to), expected, ALL_OF_16_BITS)


def around_every_boundary(type_: str) -> np.ndarray:
    """Floats at, next to and halfway between all numbers of a 16-bit format, as bits."""
    if type_ == "bf16":
        beside = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
        return ((ALL_OF_16_BITS.astype(np.uint32) << 16)[:, None] | beside).ravel()
    steps = np.abs(decoded(ALL_OF_16_BITS, type_))
    steps = np.unique(np.concatenate([steps[np.isfinite(steps)], [65536.0]]))
    middle = (steps[1:] + steps[:-1]) / 2
    exact = np.concatenate([steps, middle]).astype(np.float32)
    bits = exact.view(np.uint32)
    bits = np.concatenate([bits, bits + 1, bits[1:] - 1, special_floats("f32")])
    return np.concatenate([bits, bits | np.uint32(2**31)])


@pytest.mark.parametrize("modifiers", ["", ".relu", ".satfinite", ".relu.satfinite"])
@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("to", ["f16", "bf16"])
def test_f32_rounds_to_16_bits_at_every_boundary(to, mode, modifiers):
    bits = around_every_boundary(to)
    if modifiers:
        bits = np.concatenate([np.random.choice(bits, 20000), special_floats("f32")])
    x = decode(bits, "f32")
    found = evaluate(f"cvt.{mode}{modifiers}.{to}.f32 %d, %a;", np.uint16, bits)
    clamped = np.where(x < 0, 0.0, np.where(x == 0, 0.0, x)) if "relu" in modifiers else x
    expected = encoded(clamped, to, mode)
    if "satfinite" in modifiers:
        expected = encoded(clamped, to, mode, saturate=True)
    assert_same_codes(found, expected, x, to)


@pytest.mark.parametrize("to", ["f16x2", "bf16x2"])
def test_pairs_put_their_first_operand_into_the_upper_half(to):
    a, b = pairs(special_floats("f32"), 2000)
    found = evaluate(f"cvt.rn.{to}.f32 %d, %a, %b;", np.uint32, a, b)
    half = to.removesuffix("x2")
    for bits, part in ((a, found >> 16), (b, found & 0xFFFF)):
        x = decode(bits, "f32")
        assert_same_codes(part.astype(np.uint16), encoded(x, half), x, half)


@pytest.mark.parametrize(
    ("mode", "modifiers"),
    [
        *(("rn", ""), ("rz", ""), ("rna", ""), ("rn", ".satfinite"), ("rz", ".satfinite")),
        *(("rna", ".satfinite"), ("rn", ".satfinite.relu"), ("rz", ".satfinite.relu")),
    ],
)
def test_f32_rounds_to_tf32(mode, modifiers):
    upper = np.random.randint(0, 2**19, 30000, np.uint32) << 13
    beside = np.random.choice(np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF], np.uint32), 30000)
    bits = np.concatenate([upper | beside, special_floats("f32")])
    x = decode(bits, "f32")
    found = evaluate(f"cvt.{mode}{modifiers}.tf32.f32 %d, %a;", np.uint32, bits)
    clamped = np.where(x <= 0, 0.0, x) if "relu" in modifiers else x
    expected = encoded(clamped, "tf32", mode, saturate=bool(modifiers))
    number = ~np.isnan(x)
    np.testing.assert_array_equal(found[number] >> 13, expected[number])
    assert np.isnan(found[~number].view(np.float32)).all()


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("to", ["f32", "f16", "bf16"])
def test_f64_rounds_once(to, mode):
    bits = bits_of_floats("f64")
    near = bits_of_floats("f32").view(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore"):
        # Close to f32 numbers and ties, where double rounding would show.
        ties = near * (1 + 2.0**-24)
    bits = np.concatenate(
        [bits, near.view(np.uint64), ties.view(np.uint64), ties.view(np.uint64) + np.uint64(1)]
    )
    bits = np.random.choice(bits, 6000)
    x = bits.view(np.float64)
    found = decode(evaluate(f"cvt.{mode}.{to}.f64 %d, %a;", FORMATS[to].unsigned, bits), to)
    expected = [rounded(Fraction(v), to, mode) if np.isfinite(v) else v for v in x.tolist()]
    assert_same_floats(found, np.copysign(expected, x), x)


@pytest.mark.parametrize("of", ["e4m3", "e5m2"])
@pytest.mark.parametrize("relu", ["", ".relu"])
def test_every_pair_of_8_bit_floats_widens_exactly(of, relu):
    found = evaluate(f"cvt.rn{relu}.f16x2.{of}x2 %d, %a;", np.uint32, ALL_OF_16_BITS)
    for shift in (0, 8):
        x = decoded((ALL_OF_16_BITS >> shift & 0xFF).astype(np.uint8), of)
        if relu:
            x = np.where(x <= 0, 0.0, x)
        part = (found >> (2 * shift)).astype(np.uint16)
        assert_same_codes(part, encoded(x, "f16"), x, "f16")


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("of", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("to", ["e4m3", "e5m2"])
def test_floats_round_to_8_bits(to, of, relu):
    name = f"cvt.rn.satfinite{relu}.{to}x2."
    if of == "f32":
        # All numbers of f16 and the adjacent floats, which include the boundaries.
        bits = decoded(ALL_OF_16_BITS, "f16").astype(np.float32).view(np.uint32)
        bits = np.concatenate(
            [bits, bits + np.uint32(1), bits ^ np.uint32(1), special_floats("f32")]
        )
        other = np.random.permutation(bits)
        found = evaluate(f"{name}f32 %d, %a, %b;", np.uint16, bits, other)
        high, low = decode(bits, "f32"), decode(other, "f32")
    else:
        bits = ALL_OF_16_BITS.astype(np.uint32) << 16 | np.random.permutation(ALL_OF_16_BITS)
        found = evaluate(f"{name}{of}x2 %d, %a;", np.uint16, bits)
        high, low = decoded((bits >> 16).astype(np.uint16), of), decoded(bits.astype(np.uint16), of)
    for x, part in ((high, found >> 8), (low, found & 0xFF)):
        clamped = np.where(x <= 0, 0.0, x) if relu else x
        assert_same_codes(part.astype(np.uint8), encoded(clamped, to, saturate=True), x, to)


@pytest.mark.parametrize("to", INTEGERS)
@pytest.mark.parametrize("of", ["f16", "bf16", "f32", "f64"])
def test_floats_convert_to_integers(of, to):
    bits = ALL_OF_16_BITS if of in ("f16", "bf16") else bits_of_floats(of)
    x = decode(bits, of)
    kind, width = to[0], int(to[1:])
    low, high = (-(2 ** (width - 1)), 2 ** (width - 1) - 1) if kind == "s" else (0, 2**width - 1)
    of_nan = 2 ** (width - 1) if of == "f64" or width == 64 else 0
    for mode, to_integral in (
        ("rni", np.rint),
        ("rzi", np.trunc),
        ("rmi", np.floor),
        ("rpi", np.ceil),
    ):
        found = evaluate(f"cvt.{mode}.{to}.{of} %d, %a;", f"u{max(width, 16) // 8}", bits)
        whole = to_integral(x)
        expected = [
            of_nan if v != v else high if v >= high else low if v <= low else int(v)
            for v in whole.tolist()
        ]
        unsigned = np.array([n % 2 ** max(width, 16) for n in expected], found.dtype)
        if width == 8 and of_nan == 0:  # extended to the register
            np.testing.assert_array_equal(found, unsigned, err_msg=f"{mode}")
        else:
            np.testing.assert_array_equal(found[~np.isnan(x)], unsigned[~np.isnan(x)])
            mask = found.dtype.type(2**width - 1)
            assert (found[np.isnan(x)] & mask == of_nan).all()


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("to", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("of", INTEGERS)
def test_integers_round_once_to_floats(of, to, mode):
    width = int(of[1:])
    numbers = np.concatenate(
        [special_integers(max(width, 16)), integers(2**width, 300, f"u{max(width, 16) // 8}")]
    )
    if width == 64:
        # Close to ties of every format.
        shifts = np.random.randint(0, 40, 600).astype(np.uint64)
        ties = (
            np.random.randint(2**23, 2**24, 600, np.uint64) * np.uint64(2) + np.uint64(1)
        ) << shifts
        numbers = np.concatenate(
            [
                numbers,
                ties,
                ties + np.uint64(1),
                ties - np.uint64(1),
                np.uint64(0x8080000000000000) + np.array([0, 1], np.uint64),
            ]
        )
    mask = numbers.dtype.type(2**width - 1)
    exact = [int(n) for n in (numbers & mask)]
    if of[0] == "s":
        exact = [n - 2**width if n >= 2 ** (width - 1) else n for n in exact]
    found = decode(evaluate(f"cvt.{mode}.{to}.{of} %d, %a;", FORMATS[to].unsigned, numbers), to)
    expected = np.array([rounded(Fraction(n), to, mode) for n in exact])
    assert_same_floats(found, expected, np.array(exact, object))


@pytest.mark.parametrize("sat", ["", ".sat"])
@pytest.mark.parametrize("to", INTEGERS)
@pytest.mark.parametrize("of", INTEGERS)
def test_integers_wrap_or_saturate(of, to, sat):
    width, to_width = int(of[1:]), int(to[1:])
    numbers = np.concatenate(
        [special_integers(max(width, 16)), integers(2**width, 200, f"u{max(width, 16) // 8}")]
    )
    found = evaluate(f"cvt{sat}.{to}.{of} %d, %a;", f"u{max(to_width, 16) // 8}", numbers)
    register = 8 * found.itemsize
    low, high = (
        (-(2 ** (to_width - 1)), 2 ** (to_width - 1) - 1) if to[0] == "s" else (0, 2**to_width - 1)
    )
    expected = []
    for n in (int(n) % 2**width for n in numbers):
        n -= 2**width if of[0] == "s" and n >= 2 ** (width - 1) else 0
        if sat:
            n = min(max(n, low), high)
        n %= 2**to_width
        n -= (
            2**to_width if to[0] == "s" and n >= 2 ** (to_width - 1) else 0
        )  # extended to the register
        expected.append(n % 2**register)
    np.testing.assert_array_equal(found, np.array(expected, found.dtype))


@pytest.mark.parametrize("type_", ["f16", "bf16", "f32", "f64"])
def test_floats_round_to_integral_floats(type_):
    bits = ALL_OF_16_BITS if type_ in ("f16", "bf16") else bits_of_floats(type_)
    x = decode(bits, type_)
    for mode, to_integral in (
        ("rni", np.rint),
        ("rzi", np.trunc),
        ("rmi", np.floor),
        ("rpi", np.ceil),
    ):
        found = decode(evaluate(f"cvt.{mode}.{type_}.{type_} %d, %a;", bits.dtype, bits), type_)
        assert_same_floats(found, to_integral(x), x)


@pytest.mark.parametrize("to", ["f16", "f32", "f64"])
def test_saturation_clamps_floats_to_the_unit_interval(to):
    bits = bits_of_floats("f64")
    x = bits.view(np.float64)
    mode = "" if to == "f64" else ".rn"
    found = decode(evaluate(f"cvt{mode}.sat.{to}.f64 %d, %a;", FORMATS[to].unsigned, bits), to)
    expected = decode(encode(np.where(x > 0, np.minimum(x, 1), 0.0), to), to)
    np.testing.assert_array_equal(found, expected)
    assert not np.signbit(found).any()


@pytest.mark.parametrize(
    "form", ["cvt.rn.ftz.f16.f32", "cvt.ftz.f64.f32", "cvt.rpi.ftz.s32.f32", "cvt.rpi.ftz.f32.f32"]
)
def test_flushing_converts_subnormal_inputs_to_signed_zeros(form):
    bits = np.array([1, 0x007FFFFF, 0x80000001, 0x807FFFFF, 0x00800000], np.uint32)
    width = int(form.split(".")[-2][1:])
    found = evaluate(f"{form} %d, %a;", f"u{width // 8}", bits)
    sign = 0 if ".s32." in form else 1 << (width - 1)
    np.testing.assert_array_equal(found[:4], np.array([0, 0, sign, sign], found.dtype))
    assert (found[4] != 0) == (form != "cvt.rn.ftz.f16.f32")


def test_flushing_converts_subnormal_results_to_signed_zeros():
    x = np.array([2.0**-127, -(2.0**-127), 2.0**-126])
    found = evaluate("cvt.rn.ftz.f32.f64 %d, %a;", np.uint32, x.view(np.uint64))
    np.testing.assert_array_equal(found, [0, 0x80000000, 0x00800000])
