"""Integer, logical and selection instructions of the emulator, against Python's integers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.tests.kernels import evaluate, pairs, special_integers

SIGNED_OR_NOT = ["u16", "s16", "u32", "s32", "u64", "s64"]


def operands(width: int, count: int = 2, n: int = 400) -> list[np.ndarray]:
    special = special_integers(width)
    if count > 2:
        special = np.random.choice(special, 10, replace=False)
    return pairs(special, n, count)


def integers(bits: np.ndarray, type_: str) -> list[int]:
    """The exact values of bits."""
    width = int(type_[1:])
    numbers = [int(n) % 2**width for n in bits]
    if type_[0] == "s":
        numbers = [n - 2**width if n >= 2 ** (width - 1) else n for n in numbers]
    return numbers


def check(form: str, result: int, f, type_: str, *bits: np.ndarray, types=None) -> None:
    """The form computes f of exact integers, modulo 2 to the width of the result."""
    registers = ", ".join(f"%{r}" for r in "dabce"[: len(bits) + 1])
    found = evaluate(f"{form} {registers};", f"u{result // 8}", *bits)
    columns = [integers(b, t) for b, t in zip(bits, types or [type_] * len(bits), strict=True)]
    expected = [f(*row) % 2**result for row in zip(*columns, strict=True)]
    wrong = [i for i, n in enumerate(found) if int(n) != expected[i]]
    if wrong:
        first = wrong[0]
        inputs = [column[first] for column in columns]
        raise AssertionError(
            f"{form} of {inputs}: {int(found[first]):#x} is not {expected[first]:#x}"
            f" ({len(wrong)} of {found.size} wrong)"
        )


@pytest.mark.parametrize("type_", SIGNED_OR_NOT)
def test_sums_wrap(type_):
    width = int(type_[1:])
    bits = operands(width)
    check(f"add.{type_}", width, lambda a, b: a + b, type_, *bits)
    check(f"sub.{type_}", width, lambda a, b: a - b, type_, *bits)


def test_sums_of_s32_saturate():
    def clamp(n):
        return min(max(n, -(2**31)), 2**31 - 1)

    bits = operands(32)
    check("add.sat.s32", 32, lambda a, b: clamp(a + b), "s32", *bits)
    check("sub.sat.s32", 32, lambda a, b: clamp(a - b), "s32", *bits)


@pytest.mark.parametrize("type_", SIGNED_OR_NOT)
def test_products_have_low_high_and_wide_parts(type_):
    width = int(type_[1:])
    bits = operands(width)
    check(f"mul.lo.{type_}", width, lambda a, b: a * b, type_, *bits)
    check(f"mul.hi.{type_}", width, lambda a, b: a * b >> width, type_, *bits)
    three = operands(width, 3)
    check(f"mad.lo.{type_}", width, lambda a, b, c: a * b + c, type_, *three)
    check(f"mad.hi.{type_}", width, lambda a, b, c: (a * b >> width) + c, type_, *three)
    if width < 64:
        wide = 2 * width
        check(f"mul.wide.{type_}", wide, lambda a, b: a * b, type_, *bits)
        c = np.resize(special_integers(wide), three[0].size)
        types = [type_, type_, f"{type_[0]}{wide}"]
        check(
            f"mad.wide.{type_}", wide, lambda a, b, c: a * b + c, type_, *three[:2], c, types=types
        )


@pytest.mark.parametrize("type_", SIGNED_OR_NOT)
def test_quotients_are_truncated(type_):
    width = int(type_[1:])
    a, b = operands(width)
    a, b = a[b != 0], b[b != 0]  # division by 0 is unspecified

    def quotient(a, b):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)

    check(f"div.{type_}", width, quotient, type_, a, b)
    check(f"rem.{type_}", width, lambda a, b: a - b * quotient(a, b), type_, a, b)


@pytest.mark.parametrize("type_", SIGNED_OR_NOT)
def test_extremes_and_signs_of_integers(type_):
    width = int(type_[1:])
    a, b = operands(width)
    check(f"min.{type_}", width, min, type_, a, b)
    check(f"max.{type_}", width, max, type_, a, b)
    if type_[0] == "s":
        check(f"neg.{type_}", width, lambda a: -a, type_, a)
        check(f"abs.{type_}", width, abs, type_, a)
    if type_ == "s32":
        check("max.relu.s32", width, lambda a, b: max(a, b, 0), type_, a, b)


@pytest.mark.parametrize("width", [16, 32, 64])
def test_logic_is_bitwise(width):
    a, b = operands(width)
    type_ = f"u{width}"
    check(f"and.b{width}", width, lambda a, b: a & b, type_, a, b)
    check(f"or.b{width}", width, lambda a, b: a | b, type_, a, b)
    check(f"xor.b{width}", width, lambda a, b: a ^ b, type_, a, b)
    check(f"not.b{width}", width, lambda a: ~a, type_, a)


@pytest.mark.parametrize(
    ("name", "f"), [("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)]
)
def test_logic_of_predicates(name, f):
    a, b = operands(32)
    body = f"setp.lt.u32 %p, %a, 100;\nsetp.lt.u32 %q, %b, 100;\n{name}.pred %p, %p, %q;"
    np.testing.assert_array_equal(evaluate(body, bool, a, b), f(a < 100, b < 100))
    negated = f"setp.lt.u32 %p, %a, 100;\nsetp.lt.u32 %q, %b, 100;\n{name}.pred %p, !%p, %q;"
    np.testing.assert_array_equal(evaluate(negated, bool, a, b), f(a >= 100, b < 100))
    of_one = "setp.lt.u32 %q, %a, 100;\nnot.pred %p, %q;"
    np.testing.assert_array_equal(evaluate(of_one, bool, a), a >= 100)


def amounts(n: int) -> np.ndarray:
    """Shift amounts, including those beyond the width."""
    few = np.concatenate([np.arange(70), [127, 128, 255, 256, 2**31, 2**32 - 1]])
    return np.random.permutation(np.resize(few, n)).astype(np.uint32)


@pytest.mark.parametrize("width", [16, 32, 64])
def test_shifts_beyond_the_width_keep_only_the_sign(width):
    a = np.concatenate([operands(width)[0]] * 3)
    n = amounts(a.size)
    for type_ in (f"b{width}", f"u{width}", f"s{width}"):
        check(
            f"shr.{type_}", width, lambda a, n: a >> min(n, 200), type_, a, n, types=[type_, "u32"]
        )
    types = [f"u{width}", "u32"]
    check(f"shl.b{width}", width, lambda a, n: a << min(n, 200), types[0], a, n, types=types)


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_funnel_shifts(mode):
    low, high = operands(32)
    n = amounts(low.size)

    def by(n):
        return n % 32 if mode == "wrap" else min(n, 32)

    check(
        f"shf.l.{mode}.b32", 32, lambda a, b, n: (b << 32 | a) << by(n) >> 32, "u32", low, high, n
    )
    check(f"shf.r.{mode}.b32", 32, lambda a, b, n: (b << 32 | a) >> by(n), "u32", low, high, n)


def field(a: int, at: int, count: int, width: int, signed: bool) -> int:
    """bfe, bit by bit, as specified."""
    at, count = at & 0xFF, count & 0xFF
    sign = a >> min(at + count - 1, width - 1) & 1 if signed and count else 0
    bits = [a >> (at + i) & 1 if i < count and at + i < width else sign for i in range(width)]
    return sum(bit << i for i, bit in enumerate(bits))


def field_inserted(a: int, b: int, at: int, count: int, width: int) -> int:
    at, count = at & 0xFF, count & 0xFF
    for i in range(count):
        if at + i < width:
            b = b & ~(1 << (at + i)) | (a >> i & 1) << (at + i)
    return b


@pytest.mark.parametrize("width", [32, 64])
def test_fields_of_bits(width):
    few = np.array([0, 1, 5, 31, 32, 33, 63, 64, 65, 255, 256, 300], np.uint32)
    at, count = (np.concatenate([g.ravel()] * 4) for g in np.meshgrid(few, few))
    a, b = (np.resize(np.random.permutation(x), at.size) for x in operands(width))
    for type_ in (f"u{width}", f"s{width}"):
        check(
            f"bfe.{type_}", width, lambda a, p, n, t=type_: field(a, p, n, width, t[0] == "s"),
            type_, a, at, count, types=[f"u{width}", "u32", "u32"],
        )  # fmt: skip
    check(
        f"bfi.b{width}", width, lambda a, b, p, n: field_inserted(a, b, p, n, width),
        "", a, b, at, count, types=[f"u{width}", f"u{width}", "u32", "u32"],
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_masks_of_bits(mode):
    at, count = amounts(600), amounts(600)

    def mask(at, count):
        at, count = (x % 32 if mode == "wrap" else min(x, 32) for x in (at, count))
        return (2**count - 1) << at

    check(f"bmsk.{mode}.b32", 32, mask, "u32", at, count)


@pytest.mark.parametrize("width", [32, 64])
def test_counts_of_bits(width):
    a = operands(width)[0]
    unsigned = f"u{width}"
    check(f"popc.b{width}", 32, lambda a: a.bit_count(), unsigned, a)
    check(f"clz.b{width}", 32, lambda a: width - a.bit_length(), unsigned, a)
    check(f"brev.b{width}", width, lambda a: int(f"{a:0{width}b}"[::-1], 2), unsigned, a)
    for type_ in (unsigned, f"s{width}"):
        check(f"bfind.{type_}", 32, lambda a: (~a if a < 0 else a).bit_length() - 1, type_, a)

        def shift(a):
            length = (~a if a < 0 else a).bit_length()
            return width - length if length else -1

        check(f"bfind.shiftamt.{type_}", 32, shift, type_, a)


@pytest.mark.parametrize(
    "table", [0x00, 0x80, 0xF0, 0xCC, 0xAA, 0x96, 0xE8, 0xCA, 0xFE, 0x1B, 0xFF]
)
def test_lop3_computes_any_function(table):
    def lookup(*numbers):
        rows = (sum((n >> i & 1) << (2 - k) for k, n in enumerate(numbers)) for i in range(32))
        return sum((table >> row & 1) << i for i, row in enumerate(rows))

    a, b, c = operands(32, 3, 50)
    found = evaluate(f"lop3.b32 %d, %a, %b, %c, {table:#x};", np.uint32, a, b, c)
    expected = [lookup(*map(int, row)) for row in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(found, np.array(expected, np.uint32))


def test_prmt_permutes_bytes_and_replicates_signs():
    a, b, select = operands(32, 3, 3000)
    select = np.concatenate([select[:-2], np.array([0x3210, 0xFEDC], np.uint32)])

    def permuted(a, b, select):
        source = (b << 32 | a).to_bytes(8, "little")
        out = []
        for n in range(4):
            choice = select >> (4 * n) & 15
            byte = source[choice & 7]
            out.append((0xFF if byte >= 0x80 else 0) if choice & 8 else byte)
        return int.from_bytes(bytes(out), "little")

    check("prmt.b32", 32, permuted, "u32", a, b, select)


@pytest.mark.parametrize("a_type", ["u32", "s32"])
@pytest.mark.parametrize("b_type", ["u32", "s32"])
def test_dot_products_of_four_bytes(a_type, b_type):
    def bytes_of(n, type_):
        return [
            int(x) for x in np.array([n], np.uint32).view(np.int8 if type_ == "s32" else np.uint8)
        ]

    def dot(a, b, c):
        products = zip(bytes_of(a, a_type), bytes_of(b, b_type), strict=True)
        return c + sum(x * y for x, y in products)

    check(f"dp4a.{a_type}.{b_type}", 32, dot, "u32", *operands(32, 3, 500))


COMPARISONS = {
    "eq": int.__eq__, "ne": int.__ne__, "lt": int.__lt__, "le": int.__le__, "gt": int.__gt__,
    "ge": int.__ge__, "lo": int.__lt__, "ls": int.__le__, "hi": int.__gt__, "hs": int.__ge__,
}  # fmt: skip


@pytest.mark.parametrize("type_", [*SIGNED_OR_NOT, "b16", "b32", "b64"])
def test_integers_compare(type_):
    a, b = operands(int(type_[1:]))
    x, y = integers(a, type_), integers(b, type_)
    of_type = {"b": ["eq", "ne"], "s": ["eq", "ne", "lt", "le", "gt", "ge"], "u": list(COMPARISONS)}
    for name in of_type[type_[0]]:
        found = evaluate(f"setp.{name}.{type_} %p, %a, %b;", bool, a, b)
        expected = list(map(COMPARISONS[name], x, y))
        np.testing.assert_array_equal(found, expected, err_msg=name)


@pytest.mark.parametrize(
    ("name", "f"), [("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)]
)
def test_comparisons_combine_with_a_predicate(name, f):
    a, b = operands(32)
    for negation in ("", "!"):
        other = (a >= 100) if negation else (a < 100)
        before = f"setp.lt.u32 %p, %a, 100;\nsetp.le.{name}.u32 %p|%q, %a, %b, {negation}%p;"
        np.testing.assert_array_equal(evaluate(before, bool, a, b), f(a <= b, other))
        second = before + "\nmov.pred %p, %q;"
        np.testing.assert_array_equal(evaluate(second, bool, a, b), f(a > b, other))


@pytest.mark.parametrize("type_", ["b16", "u32", "f32", "s64", "f64"])
def test_selection(type_):
    width = int(type_[1:])
    a, b = operands(width)
    c = np.arange(a.size, dtype=np.uint32) % 3
    found = evaluate(f"setp.eq.u32 %p, %c, 1;\nselp.{type_} %d, %a, %b, %p;", a.dtype, a, b, c)
    np.testing.assert_array_equal(found, np.where(c == 1, a, b))
    found = evaluate(f"setp.eq.u32 %p, %c, 1;\nselp.{type_} %d, %a, %b, !%p;", a.dtype, a, b, c)
    np.testing.assert_array_equal(found, np.where(c == 1, b, a))


def test_moves_pack_and_unpack():
    a, b = operands(32)
    packed = evaluate("mov.b64 %d, {%a, %b};", np.uint64, a, b)
    np.testing.assert_array_equal(packed, b.astype(np.uint64) << 32 | a)
    halves = ".reg .b16 %x, %y;\nmov.b32 {%x, %y}, %a;\nmov.b32 %d, {%y, %x};"
    np.testing.assert_array_equal(evaluate(halves, np.uint32, a), a << 16 | a >> 16)
    upper = ".reg .b32 %x;\nmov.b64 {_, %x}, %a;\nmov.b32 %d, %x;"
    np.testing.assert_array_equal(evaluate(upper, np.uint32, packed), b)
    quarters = (
        ".reg .b16 %w, %x, %y, %z;\nmov.b64 {%w, %x, %y, %z}, %a;\nmov.b64 %d, {%z, %y, %x, %w};"
    )
    found = evaluate(quarters, np.uint64, packed)
    np.testing.assert_array_equal(
        found.view(np.uint16), packed.view(np.uint16).reshape(-1, 4)[:, ::-1].ravel()
    )
    for type_, text, bits in (
        ("f32", "0f3FC00000", 0x3FC00000),
        ("f64", "0d3FF8000000000000", 0x3FF8 << 48),
    ):
        wide = np.zeros(1, f"u{int(type_[1:]) // 8}")
        assert evaluate(f"mov.{type_} %d, {text};", wide.dtype, wide)[0] == bits
    assert evaluate("mov.u32 %d, -7;", np.uint32, np.zeros(1, np.uint32))[0] == 2**32 - 7
