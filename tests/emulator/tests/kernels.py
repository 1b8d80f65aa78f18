"""Small PTX kernels around single instructions, for tests of the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from tests import emulator

HEADER = ".version 8.7\n.target sm_90a\n.address_size 64\n"
THREADS = 256

# Bits of special operands: zeros, the smallest and largest subnormal and normal numbers, one and
# its neighbours, infinities and NaN, of both signs.
_SPECIAL = {
    np.uint16: {
        "f16": (0, 1, 0x03FF, 0x0400, 0x3BFF, 0x3C00, 0x3C01, 0x7BFF, 0x7C00, 0x7E00, 0x7C01),
        "bf16": (0, 1, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7FC0, 0x7F81),
    },
    np.uint32: {
        "f32": (
            *(0, 1, 0x007FFFFF, 0x00800000, 0x3F7FFFFF, 0x3F800000, 0x3F800001),
            *(0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001),
        )
    },
    np.uint64: {
        "f64": (
            *(0, 1, 0x000FFFFFFFFFFFFF, 0x0010000000000000, 0x3FF0000000000000),
            *(0x3FF0000000000001, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0x7FF8000000000000),
        )
    },
}


def special_floats(type_: str) -> np.ndarray:
    for unsigned, types in _SPECIAL.items():
        if type_ in types:
            positive = np.array(types[type_], unsigned)
            sign = unsigned(1) << unsigned(8 * positive.itemsize - 1)
            return np.concatenate([positive, positive | sign])
    raise ValueError(type_)


def special_integers(width: int) -> np.ndarray:
    numbers = {0, 1, 2, 3, 5, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 0xA5A5}
    for bit in (width // 2 - 1, width // 2, width - 2, width - 1):
        numbers |= {2**bit - 1, 2**bit, 2**bit + 1}
    numbers |= {2**width - n for n in (1, 2, 3, 8, 255, 256)}
    return np.array(sorted(n % 2**width for n in numbers), f"u{width // 8}")


def pairs(special: np.ndarray, n: int, count: int = 2) -> list[np.ndarray]:
    """Operands: every combination of special ones, then random bits, at least n in total."""
    rng = np.random.default_rng(np.random.randint(2**31))
    grids = np.meshgrid(*[special] * count)
    drawn = [rng.integers(0, 2 ** (8 * special.itemsize), n, special.dtype) for _ in range(count)]
    return [np.concatenate([g.ravel(), d]) for g, d in zip(grids, drawn, strict=True)]


def evaluate(body: str, result, *operands: np.ndarray, **seeds: int) -> np.ndarray:
    """Executes `body` in one thread per element of the operands.

    The registers %a, %b, %c, %e contain the operands, and %d receives the result; the body may use
    the predicates %p and %q. Registers are as wide as the elements, but at least 16 bits.

    Args:
        result: the type of the results; `bool` if they are in the predicate %p.
        seeds: those of `launch`.
    """
    n = operands[0].size
    padded = [np.resize(x, -(-n // THREADS) * THREADS) for x in operands]
    out = np.zeros(padded[0].size, np.uint16 if result is bool else result)
    if result is bool:
        body += "\nselp.u16 %d, 1, 0, %p;"
    widths = tuple(8 * x.itemsize for x in operands)
    kernel = _elementwise(body, 8 * out.itemsize, widths)
    emulator.launch(kernel, (out.size // THREADS,), [out, *padded], **seeds)
    return out[:n].astype(result)


@cache
def _elementwise(body: str, result: int, widths: tuple[int, ...]) -> emulator.Kernel:
    names = ("d", *"abce"[: len(widths)])
    lines = [".reg .pred %p, %q;", ".reg .b64 %address, %index;", ".reg .b32 %block, %thread;"]
    for name, width in zip(names, (result, *widths), strict=True):
        lines.append(f".reg .b{max(width, 16)} %{name};")
    lines += ["mov.u32 %block, %ctaid.x;", "mov.u32 %thread, %tid.x;"]
    lines += [f"mad.lo.u32 %thread, %block, {THREADS}, %thread;", "cvt.u64.u32 %index, %thread;"]

    def address(name: str, width: int) -> list[str]:
        load = f"ld.param.u64 %address, [of_{name}];"
        return [load, f"mad.lo.u64 %address, %index, {width // 8}, %address;"]

    for name, width in zip(names[1:], widths, strict=True):
        lines += [*address(name, width), f"ld.global.b{width} %{name}, [%address];"]
    lines += [body, *address("d", result), f"st.global.b{result} [%address], %d;", "ret;"]
    parameters = [f".param .u64 of_{name}" for name in names]
    return kernel_of(lines, parameters, f".reqntid {THREADS}, 1, 1")


def kernel_of(
    lines: Sequence[str] | str, parameters: Sequence[str] = (), directives: str = ""
) -> emulator.Kernel:
    """The kernel `k` of this body."""
    body = lines if isinstance(lines, str) else "\n".join(lines)
    text = f"{HEADER}.visible .entry k({', '.join(parameters)}) {directives}\n{{\n{body}\n}}\n"
    return emulator.parse(text).kernels["k"]


# The independent model of number formats: bits to values, and values to bits.


def to_f32(bits: np.ndarray, type_: str) -> np.ndarray:
    """Values of 16-bit formats, as f32."""
    if type_ == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def values(bits: np.ndarray, type_: str) -> np.ndarray:
    """The values of bits of a type, as f64."""
    native = {"f32": np.float32, "f64": np.float64, "f16": np.float16}
    if type_ in native:
        return bits.view(native[type_]).astype(np.float64)
    if type_ == "bf16":
        return to_f32(bits, type_).astype(np.float64)
    return bits.view(f"{type_[0].replace('s', 'i').replace('b', 'u')}{int(type_[1:]) // 8}")


def assert_same_floats(found: np.ndarray, expected: np.ndarray, *operands: np.ndarray) -> None:
    """The bits are equal, except that any NaN equals any other."""
    assert found.dtype == expected.dtype
    unsigned = f"u{found.itemsize}"
    same = found.view(unsigned) == expected.view(unsigned)
    same |= np.isnan(found) & np.isnan(expected)
    if not same.all():
        at = int(np.argmin(same))
        inputs = [x[at] for x in operands]
        raise AssertionError(
            f"{int((~same).sum())} of {same.size} differ, first {inputs}: "
            f"{found[at]!r} is not {expected[at]!r}"
        )
