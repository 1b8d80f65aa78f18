"""Bulk copies, clusters and distributed shared memory in the emulator, and faults in them."""

from __future__ import annotations

import pytest
import torch

from tests import emulator
from tests.emulator.tests.copies import INIT, kernel, planted, run, to_global, to_shared, wait

SEEDS = range(4)
BYTES = 1024
POINTERS = ".param .u64 data, .param .u64 out"
LOAD_POINTERS = "    ld.param.u64 from, [data];\n    ld.param.u64 to, [out];"


def through_shared(store: str = "cp.async.bulk.global.shared::cta.bulk_group") -> str:
    """Bulk copies from `data` to shared memory, and from there to `out`."""
    return kernel(
        POINTERS,
        f"""
    {LOAD_POINTERS}
    {INIT}
    @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], {BYTES};
    @first cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes
        [box], [from], {BYTES}, [full];
    {wait("full")}
    @first {store} [to], [box], {BYTES};
    @first cp.async.bulk.commit_group;
    @first cp.async.bulk.wait_group 0;
""",
    )


def test_bulk_copies_go_through_shared_memory():
    data, out = torch.randn(BYTES // 4), torch.zeros(BYTES // 4)
    for seed in SEEDS:
        run(through_shared(), [data, out], seed=seed)
        assert torch.equal(data, out)
        out.zero_()


@pytest.mark.parametrize(
    ("operation", "dtype", "combine"),
    [
        ("add.f32", torch.float32, torch.add),
        ("add.noftz.bf16", torch.bfloat16, torch.add),
        ("min.s32", torch.int32, torch.minimum),
        ("max.f16", torch.float16, torch.maximum),
        ("xor.b32", torch.int32, torch.bitwise_xor),
    ],
)
def test_reduction_combines_with_global_memory(operation, dtype, combine):
    shape = (BYTES // dtype.itemsize,)
    if dtype.is_floating_point:
        data, out = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    else:
        data, out = (torch.randint(-(2**30), 2**30, shape, dtype=dtype) for _ in range(2))
    expected = combine(data, out)
    run(
        through_shared(f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}"),
        [data, out],
    )
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        (f"[from], {BYTES}", "[from], 1000", "invalid"),
        ("[box], [from]", "[box+8], [from]", "misaligned"),
        ("[box], [from]", "[box], [from+4]", "misaligned"),
        (f"[to], [box], {BYTES}", f"[to], [box], {BYTES + 16}", "uninitialized|out of bounds"),
        (wait("full"), "", "race"),
        ("cp.async.bulk.wait_group 0", "cp.async.bulk.wait_group 1", "in flight"),
        (wait("full"), wait("full", 1), "race|deadlock"),
        ("[full], 1;", "[full], 2;", "deadlock"),
        (wait("full"), "@first mbarrier.inval.shared::cta.b64 [full];", "in flight|race"),
    ],
)
def test_fault_in_bulk_copies_is_found(old, new, kind):
    data, out = torch.randn(BYTES // 4), torch.zeros(BYTES // 4)
    text = planted(through_shared(), old, new)
    for seed in SEEDS:
        with pytest.raises(emulator.Fault) as found:
            run(text, [data, out], seed=seed)
        assert found.value.kind in kind.split("|"), str(found.value)


CLUSTER_SYNC = "    barrier.cluster.arrive.aligned;\n    barrier.cluster.wait.aligned;"
OWN_OUT = f"""
    mov.u32 rank, %cluster_ctarank;
    mul.wide.u32 value, rank, {BYTES};
    add.u64 to, to, value;
"""


def multicast() -> str:
    """Each block loads half of the data into the shared memory of both."""
    half = BYTES // 2
    return kernel(
        POINTERS,
        f"""
    {LOAD_POINTERS}
    {OWN_OUT}
    @first mbarrier.init.shared::cta.b64 [full], 1;
    @first fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed.aligned;
    barrier.cluster.wait.acquire.aligned;
    @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], {BYTES};
    mov.u32 base, box;
    mul.lo.u32 n, rank, {half};
    add.u32 base, base, n;
    mul.wide.u32 value, rank, {half};
    add.u64 from, from, value;
    mov.u32 x, 3;
    {{
    .reg .b16 mask;
    cvt.u16.u32 mask, x;
    @first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [base], [from], {half}, [full], mask;
    }}
    {wait("full")}
    {to_global(BYTES, 32)}
""",
        cluster=2,
    )


def neighbours() -> str:
    """Each block sends its data to the other by a bulk copy, by st.async, and by a remote load."""
    return kernel(
        POINTERS,
        f"""
    {LOAD_POINTERS}
    {OWN_OUT}
    add.u64 from, from, value;
    xor.b32 other, rank, 1;
    {INIT}
    {to_shared(512, 32)}
    fence.proxy.async.shared::cta;
    {CLUSTER_SYNC}
    mov.u32 x, box2;
    mapa.shared::cluster.u32 place, x, other;
    mov.u32 x, full;
    mapa.shared::cluster.u32 lanes, x, other;
    @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], 640;
    @first cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
        [place], [box], 512, [lanes];
    shl.b32 n, thread, 2;
    add.u32 y, place, n;
    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [y+512], thread, [lanes];
    mov.u32 x, box;
    mapa.shared::cluster.u32 x, x, other;
    add.u32 x, x, n;
    ld.shared::cluster.b32 y, [x];
    mov.u32 x, box2;
    add.u32 x, x, n;
    st.shared.b32 [x+640], y;
    {wait("full")}
    {CLUSTER_SYNC}
    {to_global(768, 32, "box2")}
""",
        cluster=2,
    )


def test_multicast_reaches_every_block():
    data, out = torch.randn(BYTES // 4), torch.zeros(2, BYTES // 4)
    for seed in SEEDS:
        run(multicast(), [data, out], grid=2, seed=seed)
        assert torch.equal(out, data.expand(2, -1))


def test_blocks_of_a_cluster_share_memory():
    data = torch.randint(0, 2**30, (2, BYTES // 4), dtype=torch.int32)
    for seed in SEEDS:
        out = torch.zeros_like(data)
        run(neighbours(), [data, out], grid=2, seed=seed)
        others = data.flip(0)
        assert torch.equal(out[:, :128], others[:, :128])
        assert torch.equal(out[:, 128:160], torch.arange(32, dtype=torch.int32).expand(2, -1))
        assert torch.equal(out[:, 160:192], others[:, :32])


@pytest.mark.parametrize(
    ("make", "old", "new", "kind"),
    [
        (multicast, "@first fence.mbarrier_init.release.cluster;", "", "race"),
        (multicast, "mov.u32 x, 3;", "mov.u32 x, 1;", "deadlock|in flight"),
        (multicast, "mov.u32 x, 3;", "mov.u32 x, 7;", "invalid"),
        (multicast, wait("full"), "", "race|uninitialized"),
        (neighbours, "[full], 640", "[full], 512", "in flight|invalid|deadlock|race"),
        (
            neighbours,
            f"{CLUSTER_SYNC}\n    mov.u32 x, box2",
            "mov.u32 x, box2",
            "uninitialized|race",
        ),
        (neighbours, f"{wait('full')}\n    {CLUSTER_SYNC}", wait("full"), "in flight|invalid"),
        (neighbours, "fence.proxy.async.shared::cta;", "", "race"),
        (
            neighbours,
            "mapa.shared::cluster.u32 place, x, other;",
            "mapa.shared::cluster.u32 place, x, 2;",
            "invalid",
        ),
    ],
)
def test_fault_in_a_cluster_is_found(make, old, new, kind):
    """In at least one interleaving: a block may happen to end after all others."""
    data = torch.randint(0, 2**30, (2, BYTES // 4), dtype=torch.int32)
    text = planted(make(), old, new)
    found = []
    for seed in range(12):
        try:
            run(text, [data, torch.zeros_like(data)], grid=2, seed=seed)
        except emulator.Fault as fault:
            found.append(fault)
    assert found
    assert all(fault.kind in kind.split("|") for fault in found), [str(f) for f in found]
