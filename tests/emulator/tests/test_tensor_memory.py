"""Tensor memory and products into it in the emulator, and faults in kernels that use them."""

from __future__ import annotations

import pytest
import torch

from tests import emulator
from tests.emulator.tests.copies import kernel, planted, run, wait

SEEDS = range(4)
COLUMNS = 32
# The leading and stride offsets of an unswizzled matrix, and the version.
DESCRIBED = (128 >> 4) << 16 | (256 >> 4) << 32 | 1 << 46
D = ", ".join(f"%d{i}" for i in range(COLUMNS))

ALLOCATE = """
    shr.u32 n, thread, 5;
    shl.b32 lanes, n, 21;
    setp.lt.u32 more, thread, 32;
    @more tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 128;
    bar.sync 0;
    ld.shared.b32 base, [slot];
    bar.sync 0;
"""
FREE = """
    bar.sync 0;
    setp.lt.u32 more, thread, 32;
    @more tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    @more tcgen05.dealloc.cta_group::1.sync.aligned.b32 base, 128;
"""


def write_out(registers: int) -> str:
    """Each thread writes its registers to a row of `to`."""
    stores = "\n".join(f"    st.global.b32 [address+{4 * i}], %d{i};" for i in range(registers))
    return f"""
    mul.wide.u32 value, thread, {4 * registers};
    add.u64 address, to, value;
{stores}
"""


def product_kernel(kind: str, description: int, rows: int, in_tensor_memory: bool) -> str:
    """to = 2 a b^T, by two products, the second of which accumulates; a row of `to` per lane."""
    a_bytes, b_bytes = rows * 32, COLUMNS * 32
    a_bulk = f"""
    @first cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes
        [box], [from], {a_bytes}, [full];"""
    a_stored = f"""
    mul.wide.u32 value, thread, 32;
    add.u64 address, from, value;
    ld.global.v4.b32 {{%d0, %d1, %d2, %d3}}, [address];
    ld.global.v4.b32 {{%d4, %d5, %d6, %d7}}, [address+16];
    add.u32 x, base, 64;
    add.u32 y, x, lanes;
    tcgen05.st.sync.aligned.32x32b.x8.b32 [y], {{{", ".join(D.split(", ")[:8])}}};
    tcgen05.wait::st.sync.aligned;
    bar.sync 0;"""
    a = "[x]" if in_tensor_memory else "left"
    expected = b_bytes + (0 if in_tensor_memory else a_bytes)
    multiply = (
        f"tcgen05.mma.cta_group::1.kind::{kind} [base], {a}, right, {description}, accumulate;"
    )
    body = f"""
    .reg .b32 %d<{COLUMNS}>;
    ld.param.u64 from, [a];
    ld.param.u64 map, [b];
    ld.param.u64 to, [out];
    @first mbarrier.init.shared::cta.b64 [full], 1;
    @first mbarrier.init.shared::cta.b64 [box2+8192], 1;
    {ALLOCATE}
    @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], {expected};
    @first cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes
        [box2], [map], {b_bytes}, [full];
    {a_stored if in_tensor_memory else a_bulk}
    {wait("full")}
    mov.u32 n, box;
    shr.u32 n, n, 4;
    cvt.u64.u32 left, n;
    or.b64 left, left, {DESCRIBED};
    mov.u32 n, box2;
    shr.u32 n, n, 4;
    cvt.u64.u32 right, n;
    or.b64 right, right, {DESCRIBED};
    setp.ne.u32 accumulate, 0, 0;
    @first {multiply}
    setp.eq.u32 accumulate, 0, 0;
    @first {multiply} // again
    @first tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [box2+8192];
    {wait("box2+8192").replace("againbox2+8192", "multiplied")}
    add.u32 y, base, lanes;
    tcgen05.ld.sync.aligned.32x32b.x{COLUMNS}.b32 {{{D}}}, [y];
    tcgen05.wait::ld.sync.aligned;
    {write_out(COLUMNS)}
    {FREE}
"""
    return kernel(".param .u64 a, .param .u64 b, .param .u64 out", body, threads=128)


def instruction(rows: int, format_a: int, format_b: int) -> int:
    return 1 << 4 | format_a << 7 | format_b << 10 | COLUMNS // 8 << 17 | rows // 16 << 24


def in_groups(matrix: torch.Tensor) -> torch.Tensor:
    """Rows of 32 bytes in the layout of unswizzled descriptors: groups of 8 rows of 16 bytes."""
    chunks = matrix.contiguous().view(torch.uint8).view(-1, 8, 2, 16)
    return chunks.transpose(1, 2).contiguous()


TYPES = {
    "f16": ("f16", 0, torch.float16),
    "bf16": ("f16", 1, torch.bfloat16),
    "tf32": ("tf32", 2, torch.float32),
    "e4m3": ("f8f6f4", 0, torch.float8_e4m3fn),
    "e5m2": ("f8f6f4", 1, torch.float8_e5m2),
}


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("in_tensor_memory", [False, True])
def test_products_equal_torch(type_, rows, in_tensor_memory):
    kind, number, dtype = TYPES[type_]
    depth = 32 // dtype.itemsize
    # Integers, whose sums are exact.
    a, b = (torch.randint(-7, 8, (n, depth)).float().to(dtype) for n in (rows, COLUMNS))
    lanes = torch.arange(rows) if rows == 128 else torch.arange(128).view(4, 2, 16)[:, 0].flatten()
    if in_tensor_memory:
        given = torch.zeros(128, 32, dtype=torch.uint8)
        given[lanes] = a.view(torch.uint8)
    else:
        given = in_groups(a)
    text = product_kernel(kind, instruction(rows, number, number), rows, in_tensor_memory)
    for seed in SEEDS:
        out = torch.zeros(128, COLUMNS)
        run(text, [given, in_groups(b), out], seed=seed)
        assert torch.equal(out[lanes], 2 * a.float() @ b.float().T)


SHARED = product_kernel("f16", instruction(128, 0, 0), 128, False)
STORED = product_kernel("f16", instruction(128, 0, 0), 128, True)
MULTIPLIED = wait("box2+8192").replace("againbox2+8192", "multiplied")


@pytest.mark.parametrize(
    ("text", "old", "new", "kind"),
    [
        (SHARED, MULTIPLIED, "", "race|uninitialized"),
        (SHARED, wait("full"), "", "race"),
        (SHARED, "setp.ne.u32 accumulate, 0, 0", "setp.eq.u32 accumulate, 1, 1", "uninitialized"),
        (SHARED, "add.u32 y, base, lanes;", "mov.u32 y, base;", "out of bounds"),
        (
            SHARED,
            "add.u32 y, base, lanes;",
            "add.u32 y, base, lanes; add.u32 y, y, 112;",
            "out of bounds",
        ),
        (SHARED, "tcgen05.wait::ld.sync.aligned;", "", "race"),
        (SHARED, "@more tcgen05.dealloc.cta_group::1.sync.aligned.b32 base, 128;", "", "invalid"),
        (SHARED, "sync.aligned.b32 base, 128", "sync.aligned.b32 base, 64", "invalid"),
        (SHARED, "[slot], 128", "[slot], 96", "invalid"),
        (
            SHARED,
            str(instruction(128, 0, 0)) + ", accumulate; // again",
            f"{9 << 24}, accumulate;",
            "unsupported",
        ),
        (
            SHARED,
            f"or.b64 right, right, {DESCRIBED}",
            f"or.b64 right, right, {DESCRIBED ^ 1 << 46}",
            "invalid",
        ),
        (SHARED, "mov.u32 n, box2;", "mov.u32 n, box2; add.u32 n, n, 1024;", "uninitialized"),
        (STORED, "tcgen05.wait::st.sync.aligned;", "", "race"),
        (
            STORED,
            "tcgen05.wait::st.sync.aligned;\n    bar.sync 0;",
            "tcgen05.wait::st.sync.aligned;",
            "race|uninitialized",
        ),
    ],
)
def test_fault_in_tensor_memory_is_found(text, old, new, kind):
    text = planted(text.replace(" // again", "") if "again" not in old else text, old, new)
    data = torch.zeros(128, 16).half()
    for seed in SEEDS:
        with pytest.raises(emulator.Fault) as found:
            run(text, [data, data[:COLUMNS].clone(), torch.zeros(128, COLUMNS)], seed=seed)
        assert found.value.kind in kind.split("|"), str(found.value)


# The lane and column of tensor memory of register r of thread t, and its registers, for .x2.
SHAPES = {
    "16x64b": (lambda t, r: (t // 4 + 8 * (t % 2), t // 2 % 2 + 2 * r), 2),
    "16x128b": (lambda t, r: (t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)), 4),
    "16x256b": (lambda t, r: (t // 4 + 8 * (r // 2 % 2), r % 2 + 2 * (t % 4) + 8 * (r // 4)), 8),
    "16x32bx2": (lambda t, r: (t % 16, r + 5 * (t // 16)), 2),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stores", [False, True])
def test_registers_map_to_lanes_and_columns_of_the_shape(shape, stores):
    place, registers = SHAPES[shape]
    wide, narrow = D.split(", ")[:16], D.split(", ")[16 : 16 + registers]
    split = ", 5" if shape == "16x32bx2" else ""
    plain = "32x32b.x16.b32"
    one = f"{shape}.x2.b32"
    fill = "\n".join(f"    mad.lo.u32 {d}, thread, 64, {i};" for i, d in enumerate(wide))
    if stores:
        number = "\n".join(f"    mad.lo.u32 {d}, thread, 64, {i};" for i, d in enumerate(narrow))
        zero = "\n".join(f"    mov.u32 {d}, 0xffff;" for d in wide)
        work = f"""{zero}{number}
    tcgen05.st.sync.aligned.{plain} [y], {{{", ".join(wide)}}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.st.sync.aligned.{one} [y]{split}, {{{", ".join(narrow)}}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.{plain} {{{", ".join(wide)}}}, [y];"""
    else:
        work = f"""{fill}
    tcgen05.st.sync.aligned.{plain} [y], {{{", ".join(wide)}}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.{one} {{{", ".join(narrow)}}}, [y]{split};"""
    written = write_out(16 if stores else registers)
    if not stores:
        for i, d in reversed(list(enumerate(narrow))):
            written = written.replace(f", %d{i};", f", {d};")
    body = f"""
    .reg .b32 %d<{COLUMNS}>;
    ld.param.u64 to, [out];
    {ALLOCATE}
    add.u32 y, base, lanes;
{work}
    tcgen05.wait::ld.sync.aligned;
    {written}
    {FREE}
"""
    out = torch.zeros(32, 16 if stores else registers, dtype=torch.int32)
    run(kernel(".param .u64 out", body), [out])
    if stores:
        expected = torch.full_like(out, 0xFFFF)
        for thread in range(32):
            for r in range(registers):
                expected[place(thread, r)] = 64 * thread + r
    else:
        expected = torch.empty_like(out)
        for thread in range(32):
            for r in range(registers):
                lane, column = place(thread, r)
                expected[thread, r] = 64 * lane + column
    assert torch.equal(out, expected)
