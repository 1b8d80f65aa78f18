"""Loads, stores, atomic operations and exchanges between lanes, each against plain Python."""

from __future__ import annotations

import numpy as np
import pytest

from tests import emulator
from tests.emulator.tests.kernels import evaluate, kernel_of

LANES = np.arange(32, dtype=np.uint32)


def words(n: int = 32) -> np.ndarray:
    return np.random.randint(0, 2**32, n).astype(np.uint32)


TYPES = [
    ("b8", 1),
    ("u8", 1),
    ("s8", 1),
    ("u16", 2),
    ("s16", 2),
    ("f32", 4),
    ("b64", 8),
    ("s32", 4),
]


@pytest.mark.parametrize("space", ["global", "shared", "local", ""])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_loads_return_stored_values_of_every_width(space, count):
    name = f".{space}" if space else ""
    for type_, size in TYPES:
        if size * count > 16:
            continue
        vector = f".v{count}" if count > 1 else ""
        width = 64 if size == 8 else 32
        registers = [f"%x{i}" for i in range(count)]
        operand = f"{{{', '.join(registers)}}}" if count > 1 else registers[0]
        at = {"global": "%to", "shared": "%s", "local": "%l", "": "%g"}[space]
        body = f"""
        .reg .b{width} %x<4>;
        .reg .b32 %t, %s;
        .reg .b64 %in, %to, %l, %g;
        .shared .align 16 .b8 smem[512];
        .local .align 16 .b8 stack[16];
        mov.u32 %t, %tid.x;
        mov.u32 %s, smem;
        mad.lo.u32 %s, %t, 16, %s;
        mov.u64 %l, stack;
        cvt.u64.u32 %g, %s;
        cvta.shared.u64 %g, %g;
        ld.param.u64 %in, [of_in];
        ld.param.u64 %to, [of_to];
        mad.wide.u32 %in, %t, 16, %in;
        mad.wide.u32 %to, %t, 16, %to;
        ld.global{vector}.{type_} {operand}, [%in];
        st{name}{vector}.{type_} [{at}], {operand};
        ld{name}{vector}.{type_} {operand}, [{at}];
        """
        # The registers, which are wider than small elements.
        [f"st.global.b{width} [%to+{512 + i * width // 8}], {r};" for i, r in enumerate(registers)]
        body = body.replace("%to, %t, 16, %to", "%to, %t, 32, %to")
        body += "\n".join(
            f"st.global.b{width} [%to+{1024 + i * width // 8}], {r};"
            for i, r in enumerate(registers)
        )
        kernel = kernel_of(body + "\nret;", [".param .u64 of_in", ".param .u64 of_to"])
        given = np.random.randint(0, 256, (32, 16)).astype(np.uint8)
        out = np.zeros((64, 32), np.uint8)
        emulator.launch(kernel, (1,), [given, out], block=(32,))
        kind = "i" if type_[0] == "s" else "u"
        elements = np.ascontiguousarray(given[:, : size * count]).view(f"{kind}{size}")
        found = np.ascontiguousarray(out[32:, : count * width // 8]).view(f"{kind}{width // 8}")
        np.testing.assert_array_equal(found, elements.astype(found.dtype), err_msg=type_)
        if space == "global":
            np.testing.assert_array_equal(out[:32, : size * count], given[:, : size * count])


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(
    ("operation", "f"),
    [
        ("add.u32", lambda old, x: old + x),
        ("min.s32", min),
        ("max.s32", max),
        ("min.u32", min),
        ("max.u32", max),
        ("and.b32", lambda old, x: old & x),
        ("or.b32", lambda old, x: old | x),
        ("xor.b32", lambda old, x: old ^ x),
        ("exch.b32", lambda old, x: x),
        ("inc.u32", lambda old, x: 0 if old >= x else old + 1),
        ("dec.u32", lambda old, x: x if old == 0 or old > x else old - 1),
    ],
)
def test_atomic_operations_are_serialized(operation, f, space):
    values = np.random.choice([0, 1, 2, 7, 31, 32, 2**31 - 1, 2**31, 2**32 - 1], 32).astype(
        np.uint32
    )
    signed = operation.endswith("s32")
    view = np.int32 if signed else np.uint32
    for name in ("atom", "red"):
        body = """
        .reg .b32 %t, %x, %old;
        .reg .b64 %in, %place;
        .shared .align 4 .b32 cell;
        mov.u32 %t, %tid.x;
        ld.param.u64 %in, [of_in];
        ld.param.u64 %place, [of_place];
        mad.wide.u32 %in, %t, 4, %in;
        ld.global.u32 %x, [%in];
        mov.u32 %old, 5;
        """
        at = "%place"
        if space == "shared":
            body += "mov.u32 %t, cell;\nst.volatile.shared.u32 [%t], 5;\nbar.warp.sync -1;\n"
            at = "%t"
        result = "%old, " if name == "atom" else ""
        body += f"{name}.{space}.{operation} {result}[{at}], %x;\nst.global.u32 [%in], %old;\n"
        if space == "shared":
            body += "bar.warp.sync -1;\nld.shared.u32 %old, [%t];\nst.global.u32 [%place], %old;\n"
        kernel = kernel_of(body + "ret;", [".param .u64 of_in", ".param .u64 of_place"])
        given, place = values.copy(), np.full(1, 5, np.uint32)
        emulator.launch(kernel, (1,), [given, place], block=(32,))
        state, before = 5, []
        for x in values.view(view).tolist():
            before.append(state)
            state = f(state, x)
            if not signed:
                state %= 2**32
        assert int(place.view(view)[0]) == state
        if name == "atom":
            np.testing.assert_array_equal(given.view(view), before)


def test_compare_and_swap():
    body = """
    .reg .b32 %t, %old;
    .reg .b64 %place, %in;
    mov.u32 %t, %tid.x;
    ld.param.u64 %in, [of_in];
    ld.param.u64 %place, [of_place];
    add.u32 %old, %t, 1;
    atom.global.cas.b32 %old, [%place], %t, %old;
    mad.wide.u32 %in, %t, 4, %in;
    st.global.u32 [%in], %old;
    ret;"""
    kernel = kernel_of(body, [".param .u64 of_in", ".param .u64 of_place"])
    out, place = np.zeros(32, np.uint32), np.zeros(1, np.uint32)
    emulator.launch(kernel, (1,), [out, place], block=(32,))
    np.testing.assert_array_equal(out, LANES)
    assert place[0] == 32


@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomic_f32_sums_flush_only_in_global_memory(space):
    body = """
    .reg .f32 %x;
    .reg .b64 %place;
    .shared .align 4 .b32 cell;
    ld.param.u64 %place, [of_place];
    ld.global.f32 %x, [%place];
    st.shared.f32 [cell], %x;
    """
    at = "%place" if space == "global" else "cell"
    body += f"red.{space}.add.f32 [{at}], %x;\nld.{space}.f32 %x, [{at}];\n"
    body += "st.global.f32 [%place], %x;\nret;"
    place = np.full(1, 2.0**-140, np.float32)
    emulator.launch(kernel_of(body, [".param .u64 of_place"]), (1,), [place], block=(1,))
    assert place[0] == (0 if space == "global" else np.float32(2.0**-139))


@pytest.mark.parametrize("type_", ["f32", "f64", "f16x2", "bf16x2"])
def test_atomic_sums_of_floats(type_):
    noftz = ".noftz" if type_.endswith("x2") else ""
    width = 64 if type_ == "f64" else 32
    body = f"""
    .reg .b{width} %x;
    .reg .b64 %place;
    ld.param.u64 %place, [of_place];
    ld.global.b{width} %x, [%place];
    red.global.add{noftz}.{type_} [%place+8], %x;
    ret;"""
    one = {"f32": 0x3F800000, "f64": 0x3FF0 << 48, "f16x2": 0x3C003C00, "bf16x2": 0x3F803F80}[type_]
    many = {"f32": 0x42000000, "f64": 0x4040 << 48, "f16x2": 0x50005000, "bf16x2": 0x42004200}[
        type_
    ]
    place = np.array([one, 0], np.uint64)
    emulator.launch(kernel_of(body, [".param .u64 of_place"]), (1,), [place], block=(32,))
    assert place[1] == many


def exchange(body: str, x: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """Executes the body in one warp; %d is the result."""
    return evaluate(body, np.uint32, x, *others)[:32]


@pytest.mark.parametrize("width", [32, 16, 8, 4])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles_stay_within_segments(mode, width):
    x = np.resize(words(), 256)
    clamp = (32 - width) << 8 | (0 if mode == "up" else 31)
    for by in (0, 1, 3, 4, 7, 15, 16, 31):
        body = f"shfl.sync.{mode}.b32 %d|%p, %a, {by}, {clamp}, -1;\n@!%p xor.b32 %d, %d, -1;"
        found = exchange(body, x)
        for lane in range(32):
            first = lane // width * width
            inside = lane - first
            source = {
                "up": inside - by,
                "down": inside + by,
                "bfly": inside ^ by,
                "idx": by % width,
            }[mode]
            if mode == "bfly":
                # Lanes below the segment are allowed, because only the upper limit is checked.
                source = (lane ^ by) - first
                is_in = (lane ^ by) <= first + width - 1
            else:
                is_in = 0 <= source < width
            expected = int(x[first + source]) if is_in else ~int(x[lane]) & 0xFFFFFFFF
            assert found[lane] == expected, (lane, by)


def test_votes():
    x = np.resize(np.random.randint(0, 3, 32).astype(np.uint32), 256)
    yes = x[:32] == 1
    compare = "setp.eq.u32 %p, %a, 1;\n"
    ballot = exchange(compare + "vote.sync.ballot.b32 %d, %p, -1;", x)
    assert (ballot == sum(1 << i for i in range(32) if yes[i])).all()
    for mode, expected in (("all", yes.all()), ("any", yes.any()), ("uni", len(set(yes)) == 1)):
        found = evaluate(compare + f"vote.sync.{mode}.pred %p, %p, -1;", bool, x)
        assert (found == expected).all(), mode
    same = np.full(256, 1, np.uint32)
    for mode in ("all", "any", "uni"):
        assert evaluate(compare + f"vote.sync.{mode}.pred %p, %p, -1;", bool, same).all()


def test_matches():
    x = np.resize(np.random.randint(0, 5, 32).astype(np.uint32), 256)
    found = exchange("match.any.sync.b32 %d, %a, -1;", x)
    expected = [sum(1 << j for j in range(32) if x[j] == x[i]) for i in range(32)]
    np.testing.assert_array_equal(found, expected)
    all_of = "match.all.sync.b32 %d|%p, %a, -1;\n@!%p xor.b32 %d, %d, 5;"
    assert (exchange(all_of, x) == 5).all()
    assert (exchange(all_of, np.full(256, 9, np.uint32)) == 2**32 - 1).all()


@pytest.mark.parametrize(
    ("operation", "f"),
    [
        ("add.u32", sum), ("add.s32", sum), ("min.u32", min), ("max.u32", max), ("min.s32", min),
        ("max.s32", max), ("and.b32", np.bitwise_and.reduce), ("or.b32", np.bitwise_or.reduce),
        ("xor.b32", np.bitwise_xor.reduce),
    ],
)  # fmt: skip
def test_reductions_of_a_warp(operation, f):
    x = np.resize(words(), 256)
    found = exchange(f"redux.sync.{operation} %d, %a, -1;", x)
    numbers = x[:32].view(np.int32 if operation.endswith("s32") else np.uint32).tolist()
    assert (found == int(f(numbers)) % 2**32).all()


def test_one_lane_is_elected():
    x = np.resize(LANES, 256)
    found = exchange("mov.u32 %d, 0;\nelect.sync _|%p, -1;\n@%p mov.u32 %d, 7;", x)
    assert sorted(found) == [0] * 31 + [7]
    assert (exchange("activemask.b32 %d;", x) == 2**32 - 1).all()


def test_exchanges_among_some_lanes():
    x = np.resize(words(), 256)
    body = """
    .reg .b32 %lane, %mask;
    mov.u32 %lane, %laneid;
    and.b32 %lane, %lane, 1;
    setp.eq.u32 %p, %lane, 0;
    selp.b32 %mask, 0x55555555, 0xAAAAAAAA, %p;
    redux.sync.add.u32 %d, %a, %mask;"""
    found = exchange(body, x)
    for parity in (0, 1):
        assert (found[parity::2] == int(x[:32][parity::2].sum(dtype=np.uint64)) % 2**32).all()


def test_special_registers():
    body = """
    .reg .b32 %x<12>;
    .reg .b64 %out;
    mov.u32 %x0, %tid.x;
    mov.u32 %x1, %tid.y;
    mov.u32 %x2, %tid.z;
    mov.u32 %x3, %ctaid.x;
    mov.u32 %x4, %ctaid.y;
    mov.u32 %x5, %ctaid.z;
    mad.lo.u32 %x6, %x2, 2, %x1;
    mad.lo.u32 %x6, %x6, 16, %x0;
    mad.lo.u32 %x7, %x5, 3, %x4;
    mad.lo.u32 %x7, %x7, 2, %x3;
    mad.lo.u32 %x7, %x7, 128, %x6;
    ld.param.u64 %out, [of_out];
    mad.wide.u32 %out, %x7, 32, %out;
    mov.u32 %x6, %laneid;
    mov.u32 %x7, %warpid;
    mov.u32 %x8, %ntid.y;
    mov.u32 %x9, %nctaid.z;
    mad.lo.u32 %x7, %x7, 100, %x8;
    mad.lo.u32 %x7, %x7, 100, %x9;
    st.global.v4.u32 [%out], {%x0, %x1, %x2, %x3};
    st.global.v4.u32 [%out+16], {%x4, %x5, %x6, %x7};
    ret;"""
    out = np.zeros((4, 3, 2, 4, 2, 16, 8), np.uint32)
    emulator.launch(kernel_of(body, [".param .u64 of_out"]), (2, 3, 4), [out], block=(16, 2, 4))
    index = np.indices(out.shape[:6])
    for register, axis in enumerate((5, 4, 3, 2, 1, 0)):
        np.testing.assert_array_equal(out[..., register], index[axis])
    thread = index[5] + 16 * (index[4] + 2 * index[3])
    np.testing.assert_array_equal(out[..., 6], thread % 32)
    np.testing.assert_array_equal(out[..., 7], (thread // 32 * 100 + 2) * 100 + 4)
