"""Each rule that the emulator checks: a kernel that keeps it runs, one that breaks it does not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.tests.rules import SEEDS, breaks, keeps, launch, rule, without

# Every word is written, and all threads know it.
FILLED = "st.shared.u32 [%own], %tid;\nbar.sync 0;\n"


def test_a_read_is_ordered_after_the_write_of_another_warp():
    body = FILLED + "st.shared.u32 [%own], 7;\nbar.sync 0; //!\nld.shared.u32 %r0, [%other];"
    rule(body, "race")


def test_a_write_is_ordered_after_the_read_of_another_warp():
    body = FILLED + "ld.shared.u32 %r0, [%other];\nbar.sync 0; //!\nst.shared.u32 [%own], 7;"
    rule(body, "race")


def test_writes_of_two_warps_are_ordered():
    body = "st.shared.u32 [%own], %tid;\nbar.sync 0; //!\nst.shared.u32 [%other], %lane;"
    rule(body, "race")


def test_a_barrier_orders_what_came_before_an_earlier_one():
    keeps(FILLED + "bar.sync 0;\nbar.sync 0;\nld.shared.u32 %r0, [%other];")


@pytest.mark.parametrize("access", ["ld.shared.u32 %r0, [%next];", "st.shared.u32 [%next], 7;"])
def test_lanes_of_a_warp_are_ordered_by_its_barrier_alone(access):
    rule(f"st.shared.u32 [%own], %tid;\nbar.warp.sync -1; //!\n{access}", "race", threads=32)
    # Nor do instructions that order nothing, a fence of proxies and an arrival, order lanes.
    breaks(f"st.shared.u32 [%own], %tid;\nfence.proxy.async;\n{access}", "race", threads=32)


def test_a_lane_need_not_wait_for_itself():
    keeps("st.shared.u32 [%own], 1;\nld.shared.u32 %r0, [%own];\nst.shared.u32 [%own], %r0;")


def test_lanes_are_ordered_by_a_barrier_of_the_block():
    keeps(FILLED + "ld.shared.u32 %r0, [%next];", threads=32)


def test_reads_by_several_lanes_are_all_remembered():
    body = (
        FILLED
        + """
    ld.shared.u32 %r0, [%base];
    bar.warp.sync -1; //!
    setp.eq.u32 %p0, %tid, 5;
    @%p0 st.shared.u32 [%base], 7;"""
    )
    rule(body, "race", threads=32)


def test_strong_accesses_race_with_weak_ones_alone():
    keeps("st.volatile.shared.u32 [%base], %tid;\nld.volatile.shared.u32 %r0, [%base];")
    keeps(FILLED + "atom.shared.add.u32 %r0, [%base], 1;\nred.shared.max.u32 [%base], 9;")
    breaks(FILLED + "atom.shared.add.u32 %r0, [%own], 1;\nld.shared.u32 %r0, [%other];", "race")


PRODUCER = """
setp.eq.u32 %p0, %warp, 0;
@!%p0 bra CONSUMER;
st.shared.u32 [%own], %tid;
bar.arrive 1, 64; //!
bra DONE;
CONSUMER:
bar.sync 1, 64;
ld.shared.u32 %r0, [%other];
DONE:
"""


def test_a_producer_arrives_at_a_named_barrier_and_a_consumer_waits():
    fault = rule(PRODUCER, "deadlock", "no warp can go on")
    assert fault.warp == 1
    breaks(PRODUCER.replace("1, 64", "1, 96"), "deadlock")


@pytest.mark.parametrize(
    ("barrier", "kind"),
    [
        ("bar.sync 1, 96;", "deadlock"),  # of two warps
        ("bar.sync 1, 32;", "race"),  # each warp passes alone
        ("bar.sync 1, 40;", "invalid"),
        ("bar.sync 16;", "invalid"),
    ],
)
def test_named_barriers_count_their_threads(barrier, kind):
    body = FILLED + "st.shared.u32 [%own], 7;\nbar.sync 1, 64;\nld.shared.u32 %r0, [%other];"
    keeps(body)
    breaks(body.replace("bar.sync 1, 64;", barrier), kind)


def test_barriers_do_not_wait_for_threads_that_exited():
    for group in ("%warp", "%lane"):
        keeps(f"setp.eq.u32 %p0, {group}, 1;\n@%p0 ret;\nbar.sync 0;\nst.global.u32 [%mine], 1;")


def test_barriers_reduce_votes():
    body = """
    setp.lt.u32 %p0, %tid, 40;
    bar.red.popc.u32 %r0, 0, %p0;
    bar.red.and.pred %p1, 0, %p0;
    bar.red.or.pred %p2, 0, %p0;
    @%p1 add.u32 %r0, %r0, 1000;
    @%p2 add.u32 %r0, %r0, 2000;
    st.global.u32 [%mine], %r0;"""
    for seed in SEEDS:
        np.testing.assert_array_equal(launch(body, seed=seed)[:64], 2040)


COPY = (
    FILLED
    + """
cp.async.ca.shared.global [%own], [%mine], 4;
cp.async.commit_group;
cp.async.wait_group 0; //!
bar.sync 1; //?
ld.shared.u32 %r0, [%other];
"""
)


def test_asynchronous_copies_are_waited_for_and_then_told_to_others():
    rule(COPY, "race")
    breaks(COPY.replace("wait_group 0", "wait_group 1"), "race")
    breaks(without(COPY, "//?"), "race")
    keeps(COPY.replace("wait_group 0", "wait_all"))
    # The lane itself needs no barrier, the lane beside it does.
    keeps(without(COPY, "//?").replace("[%other]", "[%own]"))
    breaks(without(COPY, "//?").replace("[%other]", "[%next]"), "race")
    keeps(COPY.replace("bar.sync 1", "bar.warp.sync -1").replace("[%other]", "[%next]"))


def test_waiting_for_all_groups_but_some_leaves_the_latest_in_flight():
    body = """
    cp.async.ca.shared.global [%own], [%mine], 4;
    cp.async.commit_group;
    cp.async.ca.shared.global [%own+1024], [%mine], 4;
    cp.async.commit_group;
    cp.async.wait_group 1;
    ld.shared.u32 %r0, [%own];
    """
    keeps(body)
    breaks(body + "ld.shared.u32 %r0, [%own+1024];", "race")
    keeps(body + "cp.async.wait_group 0;\nld.shared.u32 %r0, [%own+1024];")


def test_a_copy_does_not_overwrite_what_others_still_read():
    body = (
        FILLED
        + """
    ld.shared.u32 %r0, [%next];
    bar.warp.sync -1; //!
    cp.async.ca.shared.global [%own], [%mine], 4;"""
    )
    rule(body, "race", threads=32)


def test_copies_shorter_than_their_place_leave_zeros():
    body = """
    cp.async.cg.shared.global [%own], [%out], 16, 8;
    cp.async.wait_all;
    ld.shared.v4.u32 {%r0, %r1, %r2, %r3}, [%own];
    st.global.v4.u32 [%out+16], {%r0, %r1, %r2, %r3};"""
    for seed in SEEDS:
        out = np.arange(1, 65, dtype=np.uint32)
        launch(body, threads=1, seed=seed, out=out)
        np.testing.assert_array_equal(out[4:8], [1, 2, 0, 0])


def test_nothing_is_read_before_it_is_written():
    use = "add.u32 %r1, %r0, 1;\nst.global.u32 [%mine], %r1;"
    for lanes in (0, 7):
        some = f"setp.lt.u32 %p0, %lane, {lanes};\n@%p0 mov.u32 %r0, 1;\n"
        breaks(some + use, "uninitialized")
        keeps(some + use.replace("st.global", "@%p0 st.global"))  # of no consequence
    breaks("ld.shared.u32 %r0, [%own];", "uninitialized")
    local = ".local .align 8 .b8 stack[16];\nmov.u64 %rd0, stack;\nst.local.u32 [%rd0], 1;\n"
    keeps(local + "ld.local.u32 %r0, [%rd0];")
    breaks(local + "ld.local.u32 %r0, [%rd0+4];", "uninitialized")
    breaks(local + "ld.local.u32 %r0, [%rd0+16];", "out of bounds")


@pytest.mark.parametrize(
    ("access", "kind"),
    [
        ("ld.global.u32 %r0, [%out+16384];", "out of bounds"),
        ("ld.global.u32 %r0, [%out+-4];", "out of bounds"),
        ("ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%out+4];", "misaligned"),
        ("ld.global.u32 %r0, [%out+2];", "misaligned"),
        ("st.global.u32 [%out+16384], %tid;", "out of bounds"),
        ("st.global.v2.u32 [%out+12], {%tid, %tid};", "misaligned"),
        ("red.global.add.u32 [%out+16384], %tid;", "out of bounds"),
        ("st.shared.u32 [%base+8192], %tid;", "out of bounds"),
        ("ld.shared.u32 %r0, [%base+-4];", "out of bounds"),
        ("st.shared.v4.u32 [%base+8], {%tid, %tid, %tid, %tid};", "misaligned"),
        ("cp.async.ca.shared.global [%base+2], [%out], 4;", "misaligned"),
        ("cp.async.cg.shared.global [%base], [%out+8], 16;", "misaligned"),
        ("cp.async.cg.shared.global [%base], [%out+16384], 16;", "out of bounds"),
        ("ld.u32 %r0, [%out+16384];", "out of bounds"),
    ],
)
def test_accesses_stay_within_their_memory_and_alignment(access, kind):
    fault = breaks(access, kind, threads=1)
    assert fault.text == access.rstrip(";")


def test_the_last_bytes_of_memory_may_be_accessed():
    keeps("ld.global.u32 %r0, [%out+16380];\nst.shared.u32 [%base+8188], %r0;", threads=1)


def test_memory_that_may_only_be_read_is_not_written():
    out = np.zeros(64, np.uint32)
    out.flags.writeable = False
    keeps("ld.global.u32 %r0, [%mine];", out=out)
    breaks("st.global.u32 [%mine], 1;", "out of bounds", "may only read", out=out)


def test_blocks_do_not_write_what_others_access():
    of_block = "mov.u32 %r0, %ctaid.x;\nmad.wide.u32 %mine, %r0, 256, %mine;\n"
    keeps(of_block + "st.global.u32 [%mine], 1;", grid=4)
    breaks("st.global.u32 [%mine], 1;", "race", grid=4)
    reads_too = of_block + "ld.global.u32 %r1, [%out];\nst.global.u32 [%mine+1024], 1;"
    keeps(reads_too, grid=4)
    # Whichever block is first: a read before the write of another is as wrong.
    breaks(reads_too.replace("[%mine+1024]", "[%mine]"), "race", grid=4)
    keeps("red.global.add.u32 [%mine], 1;\natom.global.add.u32 %r0, [%mine], 1;", grid=4)


TAKE_TURNS = """
setp.ne.u32 %p0, %tid, 0;
@%p0 bra AFTER;
LOCK:
atom.global.acquire.gpu.cas.b32 %r0, [%out], 0, 1; //!
setp.ne.u32 %p1, %r0, 0; //!
@%p1 bra LOCK; //!
AFTER:
bar.sync 0;
ld.global.u32 %r1, [%mine+1024];
add.u32 %r1, %r1, 1;
st.global.u32 [%mine+1024], %r1;
bar.sync 0;
@%p0 bra DONE;
atom.global.release.gpu.exch.b32 %r0, [%out], 0; //?
DONE:
"""


def test_blocks_that_take_turns_by_a_lock_do_not_conflict():
    for seed in SEEDS:
        np.testing.assert_array_equal(launch(TAKE_TURNS, grid=4, seed=seed)[256:320], 4)
    breaks(without(TAKE_TURNS), "race", grid=4)
    breaks(TAKE_TURNS.replace(".release", ".relaxed"), "race", grid=4)
    breaks(TAKE_TURNS.replace(".acquire", ".relaxed"), "race", grid=4)
    # Fences make relaxed operations as good.
    fenced = TAKE_TURNS.replace(".release", ".relaxed").replace(".acquire", ".relaxed")
    fenced = fenced.replace("bar.sync 0;", "membar.gl;\nbar.sync 0;\nmembar.gl;")
    keeps(fenced, grid=4)
