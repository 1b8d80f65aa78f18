"""Matrix instructions of a warp against the layouts of the PTX ISA, in CuTe's notation."""

from __future__ import annotations

import numpy as np
import pytest

from tests import emulator
from tests.emulator.tests.kernels import kernel_of
from tests.emulator.tests.matrix_operands import (
    BYTES,
    SUMS,
    a_registers,
    b_registers,
    names,
    random_bits,
    sum_registers,
    sums_of,
    values,
)

SHAPES = [
    *(("f32", a, k) for a in ("f16", "bf16") for k in (8, 16)),
    *(("f16", "f16", k) for k in (8, 16)),
    *(("f32", "tf32", k) for k in (4, 8)),
    *(("f32", a, 32) for a in ("e4m3", "e5m2")),
    *(("s32", a, k) for a in ("s8", "u8") for k in (16, 32)),
]


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
    # And back to other rows, transposed or not.
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
