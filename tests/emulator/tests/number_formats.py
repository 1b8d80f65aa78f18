"""An independent model of the number formats of PTX: exact rounding with integers and tables."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import numpy as np


@dataclass(frozen=True)
class Format:
    """A binary format; `finite` if the code of infinity represents NaN or a finite number."""

    exponent_bits: int
    digits: int  # of the significand, including the implicit one
    width: int
    finite: bool = False

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def unsigned(self) -> str:
        return f"u{self.width // 8}"

    @property
    def infinity(self) -> int:
        return (2**self.exponent_bits - 1) << (self.digits - 1)

    @property
    def largest(self) -> int:
        """The bits of the largest finite number."""
        # e4m3 represents finite numbers by the codes of infinities, and NaN by all bits set.
        return 2 ** (self.width - 1) - 2 if self.finite else self.infinity - 1

    @property
    def sign(self) -> int:
        return 2 ** (self.width - 1)


FORMATS = {
    "e4m3": Format(4, 4, 8, finite=True),
    "e5m2": Format(5, 3, 8),
    "f16": Format(5, 11, 16),
    "bf16": Format(8, 8, 16),
    "tf32": Format(8, 11, 19),
    "f32": Format(8, 24, 32),
    "f64": Format(11, 53, 64),
}


@cache
def table(type_: str) -> np.ndarray:
    """The values of the bits 0, 1, 2, ... up to the first that is not finite, as f64.

    The last entry is the number that would follow the largest one, for rounding to nearest.
    """
    f = FORMATS[type_]
    bits = np.arange(f.largest + 2)
    exponent = bits >> (f.digits - 1)
    mantissa = bits & (2 ** (f.digits - 1) - 1)
    hidden = np.where(exponent > 0, 2 ** (f.digits - 1), 0)
    return np.ldexp(
        (mantissa + hidden).astype(float), np.maximum(exponent, 1) - f.bias - f.digits + 1
    )


def decoded(bits: np.ndarray, type_: str) -> np.ndarray:
    """The values of bits, as f64."""
    f = FORMATS[type_]
    magnitude = bits.astype(np.int64) & (f.sign - 1)
    finite = table(type_)[np.minimum(magnitude, f.largest)]
    infinite = np.inf if not f.finite else np.nan
    beyond = np.where(magnitude == f.infinity, infinite, np.nan)
    value = np.where(magnitude <= f.largest, finite, beyond)
    return np.where(bits.astype(np.int64) & f.sign, -value, value)


def encoded(x: np.ndarray, type_: str, mode: str = "rn", saturate: bool = False) -> np.ndarray:
    """The bits of finite and infinite f64 rounded to a format; unspecified for NaN.

    Args:
        mode: rn, rz, rm, rp or rna.
        saturate: whether numbers that are too large become the largest finite number.
    """
    f, steps = FORMATS[type_], table(type_)
    negative = np.signbit(x)
    magnitude = np.abs(np.where(np.isnan(x), 0, x))
    below = np.clip(np.searchsorted(steps, magnitude, side="right") - 1, 0, f.largest)
    low, high = steps[below], steps[below + 1]
    exact = low == magnitude
    if mode in ("rn", "rna"):
        half = low + (high - low) / 2  # exact: needs two digits more than the format
        up = (magnitude > half) | ((magnitude == half) & ((below % 2 == 1) | (mode == "rna")))
    else:
        outwards = {"rz": False, "rm": negative, "rp": ~negative}[mode]
        up = ~exact & np.broadcast_to(outwards, x.shape)
    code = below + up
    if saturate:
        code = np.minimum(code, f.largest)
    elif not f.finite:
        code = np.where(np.isinf(x), f.infinity, code)
    return (code + negative * f.sign).astype(np.int64)


def rounded(x: Fraction, type_: str, mode: str = "rn") -> float:
    """A number rounded to a format, as f64; 0 has no sign."""
    f = FORMATS[type_]
    if x == 0:
        return 0.0
    magnitude = abs(x)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, 1 - f.bias) - f.digits + 1)
    steps, rest = divmod(magnitude, quantum)
    if mode == "rn":
        up = 2 * rest > quantum or (2 * rest == quantum and steps % 2 == 1)
    else:
        up = bool(rest) and {"rz": False, "rm": x < 0, "rp": x > 0}[mode]
    result = (steps + up) * quantum
    sign = -1.0 if x < 0 else 1.0
    if result >= Fraction(2) ** (f.bias + 1):
        inwards = {"rn": False, "rz": True, "rm": x > 0, "rp": x < 0}[mode]
        largest = Fraction(2) ** (f.bias + 1) - Fraction(2) ** (f.bias + 1 - f.digits)
        return sign * (float(largest) if inwards else np.inf)
    return sign * float(result)
