"""Blocks that run side by side and synchronize through global memory, and faults in them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import emulator
from tests.emulator.tests.copies import kernel, planted, run, to_shared
from tests.emulator.tests.rules import SEEDS, faults, launch, passes, without

BLOCKS = 5

# Each block draws a ticket from the first word, waits until it is the turn in the second, changes
# words that all blocks share, and passes the turn on.
TURNS = """
setp.ne.u32 %p0, %tid, 0;
@%p0 bra TAKEN;
atom.global.relaxed.gpu.add.u32 %r0, [%out], 1;
WAIT:
ld.global.acquire.gpu.u32 %r1, [%out+4]; //wait
setp.ne.u32 %p1, %r1, %r0; //wait
@%p1 bra WAIT; //wait
TAKEN:
bar.sync 0; //taken
ld.global.u32 %r2, [%mine+1024];
mad.lo.u32 %r2, %r2, 3, 1;
st.global.u32 [%mine+1024], %r2;
bar.sync 0; //changed
@%p0 bra DONE;
add.u32 %r3, %r0, 1;
st.global.release.gpu.u32 [%out+4], %r3; //release
DONE:
"""
RELEASE = "st.global.release.gpu.u32 [%out+4], %r3; //release"
ACQUIRE = "ld.global.acquire.gpu.u32 %r1, [%out+4]; //wait"


def fenced(acquire: str, release: str) -> str:
    """Turns that are passed by relaxed accesses, with these fences."""
    waited = "@%p1 bra WAIT; //wait"
    text = planted(planted(TURNS, ".acquire", ".relaxed"), ".release", ".relaxed")
    text = planted(text, waited, f"{waited}\n{acquire}")
    return planted(text, "add.u32 %r3", f"{release}\nadd.u32 %r3")


@pytest.mark.parametrize("resident", [None, 1, 2, BLOCKS])
@pytest.mark.parametrize(
    "body",
    [
        TURNS,
        TURNS.replace("ld.global.acquire", "ld.acquire").replace("st.global.rel", "st.rel"),
        planted(TURNS, RELEASE, "red.release.gpu.global.add.u32 [%out+4], 1;"),
        planted(TURNS, RELEASE, "atom.acq_rel.gpu.global.add.u32 %r4, [%out+4], 1;"),
        planted(TURNS, ACQUIRE, "atom.global.acquire.gpu.add.u32 %r1, [%out+4], 0;"),
        fenced("fence.acq_rel.gpu;", "fence.acq_rel.gpu;"),
        fenced("membar.gl;", "membar.gl;").replace(".relaxed.gpu.u32", ".volatile.u32"),
    ],
    ids=["global", "generic", "red", "atom", "polling atom", "fence", "membar"],
)
def test_blocks_take_turns(body, resident):
    for seed in SEEDS:
        out = launch(body, grid=BLOCKS, seed=seed, resident=resident)
        np.testing.assert_array_equal(out[256:320], (3**BLOCKS - 1) // 2)


@pytest.mark.parametrize("resident", [1, 2, BLOCKS])
@pytest.mark.parametrize(
    "body",
    [
        without(TURNS, "//wait"),
        without(TURNS, "//taken"),
        without(TURNS, "//changed"),
        planted(TURNS, ".acquire", ".relaxed"),
        planted(TURNS, ".release", ".relaxed"),
        planted(TURNS, ".release.gpu", ""),
        planted(TURNS, ".acquire.gpu", ""),
        planted(TURNS, ".release.gpu", ".release.cta"),
        planted(TURNS, ".acquire.gpu", ".acquire.cta"),
        fenced("fence.acq_rel.gpu;", ""),
        fenced("", "fence.acq_rel.gpu;"),
        fenced("fence.acq_rel.gpu;", "fence.acq_rel.cta;"),
        # The fence of a thread does not order what other threads write.
        planted(
            planted(fenced("membar.gl;", "membar.gl;"), "membar.gl;\nadd.u32", "add.u32"),
            "bar.sync 0; //changed",
            "membar.gl;\nbar.sync 0;",
        ),
        planted(
            without(TURNS, "//release"),
            "ld.global.u32 %r2",
            "@%p0 bra EARLY;\nadd.u32 %r3, %r0, 1;\n" + RELEASE + "\nEARLY:\nld.global.u32 %r2",
        ),
    ],
    ids=[
        "no wait",
        "no barrier after the wait",
        "no barrier before the release",
        "relaxed load",
        "relaxed store",
        "weak store",
        "weak load",
        "release in the block",
        "acquire in the block",
        "no fence before the store",
        "no fence after the load",
        "fence in the block",
        "fence before the barrier",
        "release before the write",
    ],
)
def test_fault_in_turns_is_a_race(body, resident):
    faults(body, "race", grid=BLOCKS, resident=resident)


@pytest.mark.parametrize("resident", [1, 2])
@pytest.mark.parametrize(
    "poll",
    [
        ACQUIRE,
        "ld.global.volatile.u32 %r1, [%out+4];",
        "atom.global.acquire.gpu.add.u32 %r1, [%out+4], 0;",
        "atom.global.acquire.gpu.cas.b32 %r1, [%out+4], 9, 9;",
    ],
    ids=["acquire", "volatile", "add", "cas"],
)
def test_turn_that_is_not_passed_on_is_a_deadlock(poll, resident):
    body = planted(without(TURNS, "//release"), ACQUIRE, poll)
    for seed in SEEDS[:4]:
        with pytest.raises(emulator.Fault, match=r"spinning: block .*warp 0 at line") as found:
            launch(body, grid=2, seed=seed, resident=resident)
        assert found.value.kind == "deadlock"


# Each of two blocks waits for the other.
RENDEZVOUS = """
mov.u32 %r0, %ctaid.x;
mul.wide.u32 %rd0, %r0, 128;
add.u64 %rd0, %rd0, %out;
st.global.release.gpu.u32 [%rd0], 1;
xor.b32 %r0, %r0, 1;
mul.wide.u32 %rd1, %r0, 128;
add.u64 %rd1, %rd1, %out;
WAIT:
ld.global.acquire.gpu.u32 %r1, [%rd1];
setp.eq.u32 %p1, %r1, 0;
@%p1 bra WAIT;
"""


def test_waiting_for_a_block_that_cannot_start_is_a_deadlock():
    passes(RENDEZVOUS, threads=1, grid=2, resident=2)
    for seed in SEEDS[:4]:
        with pytest.raises(emulator.Fault, match="no place is free for 1 more") as found:
            launch(RENDEZVOUS, threads=1, grid=2, seed=seed, resident=1)
        assert found.value.kind == "deadlock"


def test_at_least_one_cluster_has_to_run():
    with pytest.raises(ValueError, match="resident"):
        launch("", resident=0)


def test_waiting_for_later_blocks_depends_on_their_order():
    """Blocks that wait for the one with the next index need all places, as they start in any
    order."""
    body = planted(
        TURNS, "atom.global.relaxed.gpu.add.u32 %r0, [%out], 1;", "mov.u32 %r0, %ctaid.x;"
    )
    passes(body, grid=BLOCKS, resident=BLOCKS)
    outcomes = set()
    for seed in range(8):
        try:
            launch(body, grid=2, seed=seed, resident=1)
            outcomes.add("")
        except emulator.Fault as fault:
            outcomes.add(fault.kind)
    assert outcomes == {"", "deadlock"}


# The tickets of blocks, which show the order in which they ran.
TICKETS = """
atom.global.relaxed.gpu.add.u32 %r0, [%out], 1;
mov.u32 %r1, %ctaid.x;
mad.wide.u32 %mine, %r1, 4, %out;
st.global.u32 [%mine+1024], %r0;
"""


@pytest.mark.parametrize("resident", [None, 1, 2])
def test_seeds_determine_the_order_of_blocks(resident):
    def order(seed: int) -> tuple[int, ...]:
        return tuple(launch(TICKETS, 1, 3, seed, resident=resident)[256:259])

    orders = [order(seed) for seed in range(64)]
    assert orders == [order(seed) for seed in range(64)]
    assert len(set(orders)) == 6


def test_several_readers_precede_a_write():
    """The last block overwrites what all have read."""
    body = """
    ld.global.u32 %r0, [%mine+1024];
    bar.sync 0; //!
    setp.ne.u32 %p0, %tid, 0;
    @%p0 bra DONE;
    atom.global.acq_rel.gpu.add.u32 %r1, [%out], 1;
    setp.ne.u32 %p0, %r1, 3;
    @%p0 bra DONE;
    st.global.u32 [%out+1024], 1;
    st.global.u32 [%out+1152], 1;
    DONE:
    """
    passes(body, grid=4)
    faults(without(body), "race", grid=4)
    faults(planted(body, ".acq_rel", ".acquire"), "race", grid=4)
    faults(planted(body, ".acq_rel", ".release"), "race", grid=4)


def test_weak_reads_follow_the_atomic_writes_of_all_blocks():
    body = """
    red.global.relaxed.gpu.add.u32 [%mine+1024], 1;
    bar.sync 0;
    setp.ne.u32 %p0, %tid, 0;
    @%p0 bra DONE;
    atom.global.acq_rel.gpu.add.u32 %r1, [%out], 1;
    setp.ne.u32 %p0, %r1, 3;
    @%p0 bra DONE; //!
    ld.global.u32 %r2, [%out+1152];
    DONE:
    """
    passes(body, grid=4)
    faults(without(body), "race", grid=4)


BYTES = 512
POINTERS = ".param .u64 data, .param .u64 out, .param .u64 counters, .param .u64 result"
REDUCE = f"""
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @first cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [to], [box], {BYTES};
    @first cp.async.bulk.commit_group;
    @first cp.async.bulk.wait_group 0;
"""
# All blocks add the data; the last one copies the sums to the result.
SUMS = kernel(
    POINTERS,
    f"""
    ld.param.u64 from, [data];
    ld.param.u64 to, [out];
    {to_shared(BYTES, 32)}
    {REDUCE}
    ld.param.u64 map, [counters];
    mov.u32 lanes, 0;
    @first atom.global.acq_rel.gpu.add.u32 lanes, [map], 1;
    shfl.sync.idx.b32 lanes, lanes, 0, 31, -1;
    setp.ne.u32 more, lanes, {BLOCKS - 1};
    @more ret;
    mov.u64 from, to;
    ld.param.u64 to, [result];
    {{
    .reg .b32 sum;
    .reg .b64 place;
    mad.wide.u32 place, thread, 4, from;
    ld.global.b32 sum, [place];
    mad.wide.u32 place, thread, 4, to;
    st.global.b32 [place], sum;
    }}
""",
)


def sums(text: str, seed: int) -> torch.Tensor:
    data, out, result = torch.randn(BYTES // 4), torch.zeros(BYTES // 4), torch.zeros(32)
    run(text, [data, out, torch.zeros(1, dtype=torch.int32), result], BLOCKS, seed)
    torch.testing.assert_close(result, BLOCKS * data[:32])
    return result


def test_bulk_reductions_are_released_when_they_are_complete():
    for seed in SEEDS:
        sums(SUMS, seed)


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("wait_group 0", "wait_group.read 0", "race"),
        ("wait_group 0", "wait_group 1", "race|in flight"),
        ("@first cp.async.bulk.wait_group", "@!first cp.async.bulk.wait_group", "race|in flight"),
        ("@first cp.async.bulk.commit_group;", "", "race|in flight"),
        (".acq_rel", ".relaxed", "race"),
        (".acq_rel", ".acquire", "race"),
        (".acq_rel", ".release", "race"),
        ("@more ret;", "", "race"),
    ],
)
def test_unfinished_bulk_reduction_is_found(old, new, kind):
    text = planted(SUMS, old, new)
    for seed in SEEDS:
        with pytest.raises(emulator.Fault) as found:
            sums(text, seed)
        assert found.value.kind in kind.split("|"), str(found.value)


def test_bulk_reduction_is_complete_for_its_own_block_after_a_wait():
    text = kernel(
        POINTERS,
        f"""
    ld.param.u64 from, [data];
    ld.param.u64 to, [out];
    {to_shared(BYTES, 32)}
    {REDUCE}
    bar.sync 0;
    mov.u64 from, to;
    {to_shared(BYTES, 32, "box2").replace("copy_in", "again").replace("copied_in", "done")}
""",
    )
    arguments = [torch.zeros(BYTES // 4) for _ in range(4)]
    for seed in SEEDS:
        run(text, arguments, seed=seed)
        with pytest.raises(emulator.Fault, match="unfinished copy") as found:
            run(planted(text, "wait_group 0", "wait_group.read 0"), arguments, seed=seed)
        assert found.value.kind == "race"


# Blocks add rows of the data in the order of their tickets.
ORDERED = kernel(
    POINTERS,
    f"""
    ld.param.u64 map, [counters];
    @first atom.global.relaxed.gpu.add.u32 lanes, [map], 1;
    mov.u32 place, 0;
    @!first bra taken;
    turn: ld.global.acquire.gpu.u32 place, [map+4];
    setp.ne.u32 more, place, lanes;
    @more bra turn;
    taken: bar.warp.sync -1;
    shfl.sync.idx.b32 place, place, 0, 31, -1;
    ld.param.u64 from, [data];
    mad.wide.u32 from, place, {BYTES}, from;
    ld.param.u64 to, [out];
    {to_shared(BYTES, 32)}
    {REDUCE}
    add.u32 place, place, 1;
    @first st.global.release.gpu.u32 [map+4], place;
""",
)
# Their sum depends on the order.
ROWS = torch.tensor([1.0, 2.0**24, 1.0, -(2.0**24), 3.0])[:, None].expand(BLOCKS, BYTES // 4)


def ordered_sums(text: str, seed: int) -> torch.Tensor:
    out = torch.zeros(BYTES // 4)
    counters = torch.zeros(2, dtype=torch.int32)
    run(text, [ROWS.contiguous(), out, counters, torch.zeros(32)], BLOCKS, seed)
    return out


def test_turns_order_the_sums_of_bulk_reductions():
    expected = torch.zeros(BYTES // 4)
    for row in ROWS:
        expected += row
    for seed in SEEDS:
        assert torch.equal(ordered_sums(ORDERED, seed), expected)
    # Reductions are atomic, and so their order is no race; but it is visible in some sums.
    text = planted(ORDERED, "wait_group 0", "wait_group.read 0")
    assert any(not torch.equal(ordered_sums(text, seed), expected) for seed in SEEDS)
