"""Matrix instructions of a warp group against the layouts of the PTX ISA, in CuTe's notation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests import emulator
from tests.emulator.tests.kernels import kernel_of
from tests.emulator.tests.matrix_operands import (
    BYTES,
    SUMS,
    a_registers,
    names,
    random_bits,
    sum_registers,
    sums_of,
    values,
)


def offsets(
    mn: int, depth: int, size: int, major: str, swizzle: int, lbo: int, sbo: int
) -> np.ndarray:
    """The unswizzled offset of element (mn, k) of an operand, in bytes."""
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
    """Swizzle<B, 4, 3>: the B bits from bit 7 on are XORed into those from bit 4 on."""
    bits = {0: 0, 32: 1, 64: 2, 128: 3}[swizzle]
    return address ^ (address >> 7 & (2**bits - 1)) << 4


MODES = {0: 0, 128: 1, 64: 2, 32: 3}


def place(x: np.ndarray, major: str, swizzle: int, smem: np.ndarray, start: int) -> int:
    """Writes an operand [mn, depth] to shared memory; returns its descriptor."""
    size, (mn, depth) = x.itemsize, x.shape
    t = 16 // size
    if major == "K":
        # There is unused space between groups of 8 rows.
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
    """One product of a warp group; a is a descriptor, or the registers [128, 4] of a fragment."""
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


def test_products_may_be_scaled_and_replace_sums():
    for scales in itertools.product((1, -1), repeat=2):
        for scale_d in (True, False):
            check_wgmma("f16", "f16", "f32", 8, scales=scales, scale_d=scale_d)
    check_wgmma("s8", "s8", "s32", 8, scale_d=False)
