"""Matrix instructions of the emulator against the layouts of the PTX ISA, as CuTe writes them."""

from __future__ import annotations

import itertools

import emulator
import numpy as np
import pytest
from emulator_cases import kernel_of
from number_formats import decoded

# A type's bytes, and the bits of the numbers that tests draw.
BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}


@pytest.fixture(autouse=True)
def drawn(seed):
    np.random.seed(seed % 2**32)


def random_bits(type_: str, *shape: int) -> np.ndarray:
    """Small numbers, so that their sums of products are exact in f32 and nearly so in f16."""
    if type_ in ("s8", "u8"):
        return np.random.randint(0, 256, shape).astype(np.uint8)
    small = np.random.randint(-4, 5, shape).astype(np.float32)
    if type_ == "f16":
        return small.astype(np.float16).view(np.uint16)
    if type_ in ("bf16", "tf32"):
        bits = small.view(np.uint32)
        return (bits >> 16).astype(np.uint16) if type_ == "bf16" else bits
    codes = np.array([b for b in range(256) if abs(decoded(np.uint8(b), type_)) in range(5)])
    return np.random.choice(codes, shape).astype(np.uint8)


def values(bits: np.ndarray, type_: str) -> np.ndarray:
    if type_ in ("s8", "u8"):
        return bits.view(np.int8 if type_ == "s8" else np.uint8).astype(float)
    if type_ == "tf32":
        return bits.view(np.float32).astype(float)
    return decoded(bits, type_)


def packed(elements: np.ndarray) -> np.ndarray:
    """The last axis of elements to registers of 32 bits."""
    return np.ascontiguousarray(elements).view(np.uint32)


def a_registers(a: np.ndarray) -> np.ndarray:
    """The fragment of a matrix of 16 rows: [lanes, registers].

    In CuTe's words, ((4, 8), (n, 2, 2)) threads and values to (row, column), for n elements to a
    register.
    """
    n = 4 // a.itemsize
    depth = a.shape[1]
    parts = a.reshape(2, 8, depth // (4 * n), 4, n)  # half, row, group, thread of four, element
    return packed(parts.transpose(1, 3, 2, 0, 4).reshape(32, -1))


def b_registers(b: np.ndarray) -> np.ndarray:
    """The fragment of a matrix of 8 columns, given as [column, depth]: [lanes, registers]."""
    n = 4 // b.itemsize
    parts = b.reshape(8, b.shape[1] // (4 * n), 4, n)
    return packed(parts.transpose(0, 2, 1, 3).reshape(32, -1))


def sum_registers(c: np.ndarray) -> np.ndarray:
    """The fragment of sums of 16 rows: each lane has two of 8 columns in each of two rows."""
    parts = c.reshape(2, 8, c.shape[1] // 8, 4, 2)
    return packed(parts.transpose(1, 3, 2, 0, 4).reshape(32, -1))


def sums_of(registers: np.ndarray, columns: int, dtype) -> np.ndarray:
    parts = np.ascontiguousarray(registers).view(dtype).reshape(8, 4, columns // 8, 2, 2)
    return parts.transpose(3, 0, 2, 1, 4).reshape(16, columns)


SUMS = {"f32": np.float32, "f16": np.float16, "s32": np.int32}
SHAPES = [
    *(("f32", a, k) for a in ("f16", "bf16") for k in (8, 16)),
    *(("f16", "f16", k) for k in (8, 16)),
    *(("f32", "tf32", k) for k in (4, 8)),
    *(("f32", a, 32) for a in ("e4m3", "e5m2")),
    *(("s32", a, k) for a in ("s8", "u8") for k in (16, 32)),
]


def names(prefix: str, n: int) -> str:
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(n)) + "}"


@pytest.mark.parametrize(("sum_type", "a_type", "depth"), SHAPES)
def test_a_warp_multiplies_fragments(sum_type, a_type, depth):
    others = (
        [x for x in BYTES if BYTES[x] == 1 and x[0] == a_type[0]]
        if BYTES[a_type] == 1
        else [a_type]
    )
    for b_type in others:
        a, b = random_bits(a_type, 16, depth), random_bits(b_type, 8, depth)
        c = np.random.randint(-8, 9, (16, 8)).astype(SUMS[sum_type])
        inputs = [a_registers(a), b_registers(b), sum_registers(c)]
        registers = np.concatenate(inputs, axis=1)
        n_a, n_b, n_c = (x.shape[1] for x in inputs)
        lines = [".reg .b32 %a<8>, %b<8>, %c<8>, %d<8>, %t;", ".reg .b64 %in, %out;"]
        lines += [
            "mov.u32 %t, %tid.x;",
            "ld.param.u64 %in, [of_in];",
            "ld.param.u64 %out, [of_out];",
        ]
        lines += [
            f"mad.wide.u32 %in, %t, {4 * registers.shape[1]}, %in;",
            f"mad.wide.u32 %out, %t, {4 * n_c}, %out;",
        ]
        loaded = [f"%{p}{i}" for p, n in (("a", n_a), ("b", n_b), ("c", n_c)) for i in range(n)]
        lines += [f"ld.global.b32 {r}, [%in+{4 * i}];" for i, r in enumerate(loaded)]
        lines.append(
            f"mma.sync.aligned.m16n8k{depth}.row.col.{sum_type}.{a_type}.{b_type}.{sum_type} "
            f"{names('d', n_c)}, {names('a', n_a)}, {names('b', n_b)}, {names('c', n_c)};"
        )
        lines += [f"st.global.b32 [%out+{4 * i}], %d{i};" for i in range(n_c)]
        kernel = kernel_of([*lines, "ret;"], [".param .u64 of_in", ".param .u64 of_out"])
        out = np.zeros((32, n_c), np.uint32)
        emulator.launch(kernel, (1,), [registers, out], block=(32,))
        expected = values(a, a_type) @ values(b, b_type).T + c
        np.testing.assert_array_equal(
            sums_of(out, 8, SUMS[sum_type]), expected.astype(SUMS[sum_type])
        )


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_are_loaded_and_stored_by_rows(count, trans):
    matrices = np.random.randint(0, 2**16, (4, 8, 8)).astype(np.uint16)
    lanes = (
        ".reg .b32 %r<8>, %t, %row, %to;\n.reg .b64 %in, %out;\n.shared .align 16 .b8 smem[1024];"
    )
    body = f"""{lanes}
    mov.u32 %t, %tid.x;
    ld.param.u64 %in, [of_in];
    ld.param.u64 %out, [of_out];
    mad.wide.u32 %in, %t, 16, %in;
    mov.u32 %row, smem;
    mad.lo.u32 %to, %t, 16, %row;
    ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%in];
    st.shared.v4.b32 [%to], {{%r0, %r1, %r2, %r3}};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {names("r", count)}, [%to];
    mad.wide.u32 %out, %t, 16, %out;
    """
    body += "\n".join(f"st.global.b32 [%out+{4 * n}], %r{n};" for n in range(count))
    # And back, to other rows, transposed or not.
    body += f"""
    stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%to+512], {names("r", count)};
    bar.warp.sync -1;
    setp.ge.u32 %p, %t, {8 * count};
    @%p ret;
    ld.shared.v4.b32 {{%r0, %r1, %r2, %r3}}, [%to+512];
    st.global.v4.b32 [%out+512], {{%r0, %r1, %r2, %r3}};
    ret;"""
    kernel = kernel_of(".reg .pred %p;\n" + body, [".param .u64 of_in", ".param .u64 of_out"])
    out = np.zeros(512, np.uint16)
    emulator.launch(kernel, (1,), [matrices, out], block=(32,))
    loaded = out[:256].reshape(32, 4, 2)[:, :count]
    for n in range(count):
        seen = matrices[n].T if trans else matrices[n]
        np.testing.assert_array_equal(loaded[:, n].reshape(8, 8), seen)
    stored = out[256 : 256 + 64 * count].reshape(count, 8, 8)
    np.testing.assert_array_equal(stored, matrices[:count])


# Shared memory operands of wgmma. Offsets are in elements, as CuTe's layouts of the PTX ISA are:
# T elements are 16 bytes.


def offsets(
    mn: int, depth: int, size: int, major: str, swizzle: int, lbo: int, sbo: int
) -> np.ndarray:
    """Where element (mn, k) of an operand lies, before it is swizzled, in bytes."""
    t = 16 // size
    i, k = np.meshgrid(np.arange(mn), np.arange(depth), indexing="ij")
    if major == "K" and not swizzle:  # ((8, m), (T, 2k)) : ((1T, SBO), (1, LBO))
        return (i % 8 * t + k % t) * size + i // 8 * sbo + k // t * lbo
    if major == "K":  # ((8, m), (T, 2k)) : ((wT, SBO), (1, T))
        return (i % 8 * (swizzle // 16) * t + k) * size + i // 8 * sbo
    if not swizzle:  # ((T, 1, m), (8, k)) : ((1, T, SBO), (1T, LBO))
        return (i % t + k % 8 * t) * size + i // t * sbo + k // 8 * lbo
    w = swizzle // 16  # ((T, w, m), (8, k)) : ((1, T, LBO), (wT, SBO))
    return (i % (w * t) + k % 8 * w * t) * size + i // (w * t) * lbo + k // 8 * sbo


def swizzled(address: np.ndarray, swizzle: int) -> np.ndarray:
    """Swizzle<B, 4, 3>: the B bits from bit 7 on are added to those from bit 4 on."""
    bits = {0: 0, 32: 1, 64: 2, 128: 3}[swizzle]
    return address ^ (address >> 7 & (2**bits - 1)) << 4


MODES = {0: 0, 128: 1, 64: 2, 32: 3}


def place(x: np.ndarray, major: str, swizzle: int, smem: np.ndarray, start: int) -> int:
    """Writes an operand [mn, depth] to shared memory; returns its descriptor."""
    size, (mn, depth) = x.itemsize, x.shape
    t = 16 // size
    if major == "K":
        # Groups of 8 rows are apart by more than they need.
        sbo = 8 * max(swizzle, 16) * (1 if swizzle else depth // t + 1)
        lbo = 128 if not swizzle else 16
        if swizzle:
            sbo = 8 * swizzle
    elif swizzle:
        blocks = -(-mn // (swizzle // size))
        lbo, sbo = 8 * swizzle, 8 * swizzle * blocks
    else:
        sbo, lbo = 128, 128 * -(-mn // t)
    at = swizzled(start + offsets(mn, depth, size, major, swizzle, lbo, sbo), swizzle)
    assert np.unique(at).size == at.size
    for byte in range(size):
        smem[at + byte] = x.view(np.uint8).reshape(mn, depth, size)[..., byte]
    return start >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | MODES[swizzle] << 62


def run_wgmma(
    form: str, b_smem: int, smem: np.ndarray, a, c: np.ndarray, tail: str, scale_d: bool, seed: int
) -> np.ndarray:
    """One product of a warp group: a is a descriptor, or registers [128, 4] of a fragment."""
    per_lane = c.shape[1]
    in_registers = not isinstance(a, int)
    accumulators = names("d", per_lane)
    operand = names("a", 4) if in_registers else "%adesc"
    body = f"""
    .reg .pred %p;
    .reg .b32 %t, %to, %d<{per_lane}>, %a<4>, %r<4>;
    .reg .b64 %in, %of_smem, %of_a, %adesc, %bdesc;
    .shared .align 1024 .b8 smem[65536];
    mov.u32 %t, %tid.x;
    ld.param.u64 %in, [of_c];
    ld.param.u64 %of_smem, [of_smem];
    mad.wide.u32 %in, %t, {4 * per_lane}, %in;
    mov.u32 %to, smem;
    mad.lo.u32 %to, %t, 16, %to;
    mad.wide.u32 %of_smem, %t, 16, %of_smem;
    """
    for first in range(0, smem.size, 2048):
        body += f"""
        ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%of_smem+{first}];
        st.shared.v4.b32 [%to+{first}], {{%r0, %r1, %r2, %r3}};"""
    if in_registers:
        body += "\nld.param.u64 %of_a, [of_a];\nmad.wide.u32 %of_a, %t, 16, %of_a;"
        body += f"\nld.global.v4.b32 {operand}, [%of_a];"
    body += "\nfence.proxy.async;\nbar.sync 0;\n"
    body += "\n".join(f"ld.global.b32 %d{i}, [%in+{4 * i}];" for i in range(per_lane))
    body += f"""
    mov.b64 %adesc, {a if not in_registers else 0};
    mov.b64 %bdesc, {b_smem};
    setp.eq.u32 %p, {int(scale_d)}, 1;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.{form} {accumulators}, {operand}, %bdesc, {tail};
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    """
    body += "\n".join(f"st.global.b32 [%in+{4 * i}], %d{i};" for i in range(per_lane)) + "\nret;"
    kernel = kernel_of(body, [".param .u64 of_c", ".param .u64 of_smem", ".param .u64 of_a"])
    out = c.copy()
    fragment = a if in_registers else np.zeros(1, np.uint32)
    emulator.launch(kernel, (1,), [out, smem, fragment], block=(128,), seed=seed)
    return out


def check_wgmma(
    a_type,
    b_type,
    sum_type,
    n,
    *,
    a_major="K",
    b_major="K",
    swizzle=128,
    b_swizzle=None,
    a_registers_too=False,
    scale_d=True,
    scales=(1, 1),
):
    depth = 32 // BYTES[a_type]
    a, b = random_bits(a_type, 64, depth), random_bits(b_type, n, depth)
    c = np.random.randint(-8, 9, (64, n)).astype(SUMS[sum_type])
    dtype = SUMS[sum_type]
    held = np.concatenate([sum_registers(c[16 * w : 16 * w + 16]) for w in range(4)])
    b_swizzle = swizzle if b_swizzle is None else b_swizzle
    smem = np.random.randint(0, 256, 64 * 1024).astype(np.uint8)
    b_start = 16 * 1024
    b_described = place(b, b_major, b_swizzle, smem, b_start)
    if a_registers_too:
        a_given = np.concatenate([a_registers(a[16 * w : 16 * w + 16]) for w in range(4)])
    else:
        a_given = place(a, a_major, swizzle, smem, 1024)
    tail = "%p"
    if sum_type != "s32":
        tail += f", {scales[0]}, {scales[1]}"
        if BYTES[a_type] == 2:
            tail += (
                "" if a_registers_too else f", {int(a_major == 'MN')}"
            ) + f", {int(b_major == 'MN')}"
    form = f"m64n{n}k{depth}.{sum_type}.{a_type}.{b_type}"
    used = smem[: b_start + 2048 * -(-n * 64 * BYTES[b_type] // 1024) + 2048]
    found = run_wgmma(
        form, b_described, used, a_given, held, tail, scale_d, np.random.randint(2**31)
    )
    product = values(a, a_type) @ values(b, b_type).T * scales[0] * scales[1]
    expected = (product + (c if scale_d else 0)).astype(dtype)
    sums = np.concatenate([sums_of(found[32 * w : 32 * w + 32], n, dtype) for w in range(4)])
    np.testing.assert_array_equal(sums, expected)


@pytest.mark.parametrize("b_major", ["K", "MN"])
@pytest.mark.parametrize("a_major", ["K", "MN"])
@pytest.mark.parametrize("type_", ["f16", "bf16"])
def test_a_warp_group_multiplies_every_layout_of_16_bit_operands(type_, a_major, b_major):
    for a_swizzle, b_swizzle in itertools.product(MODES, repeat=2):
        check_wgmma(
            type_,
            type_,
            "f32",
            64,
            a_major=a_major,
            b_major=b_major,
            swizzle=a_swizzle,
            b_swizzle=b_swizzle,
        )


@pytest.mark.parametrize("swizzle", MODES)
@pytest.mark.parametrize(
    ("a_type", "b_type", "sum_type"),
    [
        *(("tf32", "tf32", "f32"), ("f16", "f16", "f16")),
        *((a, b, c) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2") for c in ("f32", "f16")),
        *((a, b, "s32") for a in ("s8", "u8") for b in ("s8", "u8")),
    ],
)
def test_a_warp_group_multiplies_every_type(a_type, b_type, sum_type, swizzle):
    check_wgmma(a_type, b_type, sum_type, 16, swizzle=swizzle)
    check_wgmma(a_type, b_type, sum_type, 8, swizzle=swizzle, a_registers_too=True)


@pytest.mark.parametrize("first", [8, 72, 136, 200])
def test_a_warp_group_multiplies_every_number_of_columns(first):
    for n in range(first, first + 64, 8):
        check_wgmma("bf16", "bf16", "f32", n, b_major=["K", "MN"][n // 8 % 2], a_registers_too=True)


def test_products_are_scaled_and_sums_begin_anew():
    for scales in itertools.product((1, -1), repeat=2):
        for scale_d in (True, False):
            check_wgmma("f16", "f16", "f32", 8, scales=scales, scale_d=scale_d)
    check_wgmma("s8", "s8", "s32", 8, scale_d=False)
