"""Each rule that the emulator checks: kernels that follow it run, and violations are faults."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.tests.rules import SEEDS, check_rule, faults, launch, passes, without

# Every word is written before a barrier.
FILLED = "st.shared.u32 [%own], %tid;\nbar.sync 0;\n"


def test_reads_after_writes_of_another_warp_need_a_barrier():
    body = FILLED + "st.shared.u32 [%own], 7;\nbar.sync 0; //!\nld.shared.u32 %r0, [%other];"
    check_rule(body, "race")


def test_writes_after_reads_of_another_warp_need_a_barrier():
    body = FILLED + "ld.shared.u32 %r0, [%other];\nbar.sync 0; //!\nst.shared.u32 [%own], 7;"
    check_rule(body, "race")


def test_writes_of_two_warps_need_a_barrier():
    body = "st.shared.u32 [%own], %tid;\nbar.sync 0; //!\nst.shared.u32 [%other], %lane;"
    check_rule(body, "race")


def test_barriers_order_accesses_before_earlier_barriers():
    passes(FILLED + "bar.sync 0;\nbar.sync 0;\nld.shared.u32 %r0, [%other];")


@pytest.mark.parametrize("access", ["ld.shared.u32 %r0, [%next];", "st.shared.u32 [%next], 7;"])
def test_lanes_of_a_warp_need_a_barrier(access):
    check_rule(f"st.shared.u32 [%own], %tid;\nbar.warp.sync -1; //!\n{access}", "race", threads=32)
    # A proxy fence does not order lanes either.
    faults(f"st.shared.u32 [%own], %tid;\nfence.proxy.async;\n{access}", "race", threads=32)


def test_accesses_of_one_lane_are_ordered():
    passes("st.shared.u32 [%own], 1;\nld.shared.u32 %r0, [%own];\nst.shared.u32 [%own], %r0;")


def test_block_barriers_order_lanes():
    passes(FILLED + "ld.shared.u32 %r0, [%next];", threads=32)


def test_reads_of_all_lanes_are_tracked():
    body = (
        FILLED
        + """
    ld.shared.u32 %r0, [%base];
    bar.warp.sync -1; //!
    setp.eq.u32 %p0, %tid, 5;
    @%p0 st.shared.u32 [%base], 7;"""
    )
    check_rule(body, "race", threads=32)


def test_strong_accesses_race_only_with_weak_ones():
    passes("st.volatile.shared.u32 [%base], %tid;\nld.volatile.shared.u32 %r0, [%base];")
    passes(FILLED + "atom.shared.add.u32 %r0, [%base], 1;\nred.shared.max.u32 [%base], 9;")
    faults(FILLED + "atom.shared.add.u32 %r0, [%own], 1;\nld.shared.u32 %r0, [%other];", "race")


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


def test_named_barriers_synchronize_producers_and_consumers():
    fault = check_rule(PRODUCER, "deadlock", "no warp can proceed")
    assert fault.warp == 1
    faults(PRODUCER.replace("1, 64", "1, 96"), "deadlock")


@pytest.mark.parametrize(
    ("barrier", "kind"),
    [
        ("bar.sync 1, 96;", "deadlock"),  # there are two warps
        ("bar.sync 1, 32;", "race"),  # each warp passes alone
        ("bar.sync 1, 40;", "invalid"),
        ("bar.sync 16;", "invalid"),
    ],
)
def test_named_barriers_count_their_threads(barrier, kind):
    body = FILLED + "st.shared.u32 [%own], 7;\nbar.sync 1, 64;\nld.shared.u32 %r0, [%other];"
    passes(body)
    faults(body.replace("bar.sync 1, 64;", barrier), kind)


def test_barriers_do_not_wait_for_threads_that_exited():
    for group in ("%warp", "%lane"):
        passes(f"setp.eq.u32 %p0, {group}, 1;\n@%p0 ret;\nbar.sync 0;\nst.global.u32 [%mine], 1;")


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


def test_async_copies_need_a_wait_and_a_barrier():
    check_rule(COPY, "race")
    faults(COPY.replace("wait_group 0", "wait_group 1"), "race")
    faults(without(COPY, "//?"), "race")
    passes(COPY.replace("wait_group 0", "wait_all"))
    # The lane itself needs no barrier, but the neighbouring lane does.
    passes(without(COPY, "//?").replace("[%other]", "[%own]"))
    faults(without(COPY, "//?").replace("[%other]", "[%next]"), "race")
    passes(COPY.replace("bar.sync 1", "bar.warp.sync -1").replace("[%other]", "[%next]"))


def test_wait_group_leaves_the_latest_groups_in_flight():
    body = """
    cp.async.ca.shared.global [%own], [%mine], 4;
    cp.async.commit_group;
    cp.async.ca.shared.global [%own+1024], [%mine], 4;
    cp.async.commit_group;
    cp.async.wait_group 1;
    ld.shared.u32 %r0, [%own];
    """
    passes(body)
    faults(body + "ld.shared.u32 %r0, [%own+1024];", "race")
    passes(body + "cp.async.wait_group 0;\nld.shared.u32 %r0, [%own+1024];")


def test_copies_race_with_earlier_reads():
    body = (
        FILLED
        + """
    ld.shared.u32 %r0, [%next];
    bar.warp.sync -1; //!
    cp.async.ca.shared.global [%own], [%mine], 4;"""
    )
    check_rule(body, "race", threads=32)


def test_short_copies_fill_with_zeros():
    body = """
    cp.async.cg.shared.global [%own], [%out], 16, 8;
    cp.async.wait_all;
    ld.shared.v4.u32 {%r0, %r1, %r2, %r3}, [%own];
    st.global.v4.u32 [%out+16], {%r0, %r1, %r2, %r3};"""
    for seed in SEEDS:
        out = np.arange(1, 65, dtype=np.uint32)
        launch(body, threads=1, seed=seed, out=out)
        np.testing.assert_array_equal(out[4:8], [1, 2, 0, 0])


def test_uninitialized_reads_fault():
    use = "add.u32 %r1, %r0, 1;\nst.global.u32 [%mine], %r1;"
    for lanes in (0, 7):
        some = f"setp.lt.u32 %p0, %lane, {lanes};\n@%p0 mov.u32 %r0, 1;\n"
        faults(some + use, "uninitialized")
        passes(some + use.replace("st.global", "@%p0 st.global"))  # the predicate is false
    faults("ld.shared.u32 %r0, [%own];", "uninitialized")
    local = ".local .align 8 .b8 stack[16];\nmov.u64 %rd0, stack;\nst.local.u32 [%rd0], 1;\n"
    passes(local + "ld.local.u32 %r0, [%rd0];")
    faults(local + "ld.local.u32 %r0, [%rd0+4];", "uninitialized")
    faults(local + "ld.local.u32 %r0, [%rd0+16];", "out of bounds")


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
def test_out_of_bounds_and_misaligned_accesses_fault(access, kind):
    fault = faults(access, kind, threads=1)
    assert fault.text == access.rstrip(";")


def test_the_last_bytes_of_memory_may_be_accessed():
    passes("ld.global.u32 %r0, [%out+16380];\nst.shared.u32 [%base+8188], %r0;", threads=1)


def test_stores_to_read_only_memory_fault():
    out = np.zeros(64, np.uint32)
    out.flags.writeable = False
    passes("ld.global.u32 %r0, [%mine];", out=out)
    faults("st.global.u32 [%mine], 1;", "out of bounds", "read-only", out=out)


def test_conflicting_accesses_of_blocks_are_races():
    of_block = "mov.u32 %r0, %ctaid.x;\nmad.wide.u32 %mine, %r0, 256, %mine;\n"
    passes(of_block + "st.global.u32 [%mine], 1;", grid=4)
    faults("st.global.u32 [%mine], 1;", "race", grid=4)
    reads_too = of_block + "ld.global.u32 %r1, [%out];\nst.global.u32 [%mine+1024], 1;"
    passes(reads_too, grid=4)
    # In either order of blocks: a read before the write of another block is a race, too.
    faults(reads_too.replace("[%mine+1024]", "[%mine]"), "race", grid=4)
    passes("red.global.add.u32 [%mine], 1;\natom.global.add.u32 %r0, [%mine], 1;", grid=4)


LOCKED = """
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


def test_locks_order_accesses_of_blocks():
    for seed in SEEDS:
        np.testing.assert_array_equal(launch(LOCKED, grid=4, seed=seed)[256:320], 4)
    faults(without(LOCKED), "race", grid=4)
    faults(LOCKED.replace(".release", ".relaxed"), "race", grid=4)
    faults(LOCKED.replace(".acquire", ".relaxed"), "race", grid=4)
    # Relaxed operations with fences suffice.
    fenced = LOCKED.replace(".release", ".relaxed").replace(".acquire", ".relaxed")
    fenced = fenced.replace("bar.sync 0;", "membar.gl;\nbar.sync 0;\nmembar.gl;")
    passes(fenced, grid=4)
