"""Rules of wgmma and mbarriers: kernels that follow them run, and violations are faults."""

from __future__ import annotations

import numpy as np

from tests.emulator.tests.rules import SEEDS, check_rule, faults, launch, passes, without

# 64 x 16 ones at %base, followed by 8 x 16 ones, and their product: 16 in each sum.
OPERANDS = """
mad.lo.u32 %r0, %tid, 16, %base;
mov.b32 %r1, 0x3F803F80;
st.shared.v4.b32 [%r0], {%r1, %r1, %r1, %r1};
st.shared.v4.b32 [%r0+2048], {%r1, %r1, %r1, %r1};
fence.proxy.async; //fence
bar.sync 0; //bar
cvt.u64.u32 %rd0, %base;
shr.u64 %rd0, %rd0, 4;
or.b64 %rd0, %rd0, 0x0000001000080000;
add.u64 %rd1, %rd0, 128;
setp.eq.u32 %p0, 0, 0;
"""
SUMS = "{%f0, %f1, %f2, %f3}"
MULTIPLY = (
    f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {SUMS}, %rd0, %rd1, %p0, 1, 1, 0, 0;\n"
)
# Computed, because constants may be set after a fence.
ZEROS = "\n".join(f"add.f32 %f{i}, 0f00000000, 0f00000000;" for i in range(4)) + "\n"
FENCE = "wgmma.fence.sync.aligned; //order\n"
WAIT = "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0; //wait\n"
STORE = "\n".join(f"st.global.f32 [%mine+{4096 * i}], %f{i};" for i in range(4)) + "\n"
PRODUCT = OPERANDS + ZEROS + FENCE + MULTIPLY + WAIT + STORE


def test_products_are_correct():
    for seed in SEEDS:
        out = launch(PRODUCT, threads=128, seed=seed).view(np.float32)
        np.testing.assert_array_equal(out.reshape(4, 1024)[:, :128], 16)


def test_operands_need_a_proxy_fence():
    check_rule(PRODUCT, "race", "fence.proxy.async", mark="//fence", threads=128)
    copied = PRODUCT.replace(
        "st.shared.v4.b32 [%r0], {%r1, %r1, %r1, %r1};",
        "cp.async.cg.shared.global [%r0], [%out], 16;\ncp.async.wait_all;",
    )
    check_rule(copied, "race", "fence.proxy.async", mark="//fence", threads=128)


def test_operands_of_other_warps_need_a_barrier():
    check_rule(PRODUCT, "race", mark="//bar", threads=128)


def test_written_accumulators_need_a_fence():
    check_rule(PRODUCT, "race", "wgmma.fence", mark="//order", threads=128)
    constants = "\n".join(f"mov.f32 %f{i}, 0f00000000;" for i in range(4)) + "\n"
    passes(PRODUCT.replace(ZEROS, "").replace(MULTIPLY, constants + MULTIPLY), threads=128)


def test_accumulators_in_flight_may_not_be_accessed():
    check_rule(PRODUCT, "in flight", mark="//wait", threads=128)
    loose = PRODUCT.replace("wait_group.sync.aligned 0", "wait_group.sync.aligned 1")
    faults(loose, "in flight", threads=128)


def test_operands_in_flight_may_not_be_overwritten():
    overwrite = "st.shared.b32 [%r0], %tid;\n"
    early = OPERANDS + ZEROS + FENCE + MULTIPLY + "wgmma.commit_group.sync.aligned;\n" + overwrite
    faults(early, "race", threads=128)
    # Each warp waits only for itself; the others need a barrier.
    late = PRODUCT + "bar.sync 0; //!\nmov.u32 %r1, 7;\nst.shared.b32 [%r0], %r1;"
    passes(late, threads=128)


def test_consecutive_products_of_one_shape_need_no_fence():
    body = OPERANDS + ZEROS + FENCE + MULTIPLY * 3 + WAIT + STORE
    for seed in SEEDS:
        out = launch(body, threads=128, seed=seed).view(np.float32)
        np.testing.assert_array_equal(out.reshape(4, 1024)[:, :128], 48)


def test_register_fragments_in_flight_may_not_be_changed():
    ones = "\n".join(f"or.b32 %r{i}, 0x3F803F80, 0;" for i in range(4, 8)) + "\n"
    multiply = MULTIPLY.replace(
        "%rd0, %rd1, %p0, 1, 1, 0, 0", "{%r4, %r5, %r6, %r7}, %rd1, %p0, 1, 1, 0"
    )
    body = OPERANDS + ZEROS + ones + FENCE + multiply + WAIT + "mov.b32 %r4, 0;\n" + STORE
    check_rule(body, "in flight", mark="//wait", threads=128)
    check_rule(body, "race", "wgmma.fence", mark="//order", threads=128)
    undefined = body.replace("or.b32 %r7, 0x3F803F80, 0;", "@!%p0 mov.b32 %r7, 0;")
    faults(undefined, "uninitialized", threads=128)


def test_new_sums_need_no_initial_value():
    body = without(PRODUCT, "add.f32 %f").replace("setp.eq.u32 %p0, 0, 0", "setp.eq.u32 %p0, 0, 1")
    for seed in SEEDS:
        out = launch(body, threads=128, seed=seed).view(np.float32)
        np.testing.assert_array_equal(out.reshape(4, 1024)[:, :128], 16)


def test_warps_of_a_group_must_agree_on_the_product():
    moved = "setp.eq.u32 %p1, %warp, 2;\n@%p1 add.u64 %rd1, %rd1, 1;\n"
    faults(PRODUCT.replace(FENCE, moved + FENCE), "invalid", "differ", threads=128)
    absent = "setp.eq.u32 %p1, %warp, 2;\n@%p1 bra AWAY;\n"
    faults(PRODUCT.replace(FENCE, absent + FENCE) + "AWAY:\n", "deadlock", threads=128)


def test_descriptors_beyond_shared_memory_fault():
    far = "add.u64 %rd1, %rd1, 384;\n"
    faults(PRODUCT.replace(FENCE, far + FENCE), "out of bounds", threads=128)


# mbarriers at %base: warp 0 fills its words of a buffer, warp 1 reads them and signals warp 0.
BARRIER = """
setp.ne.u32 %p0, %tid, 0;
@%p0 bra READY;
mbarrier.init.shared.b64 [%base], 32;
READY:
bar.sync 0; //init
"""
HAND_OVER = (
    BARRIER
    + """
setp.ne.u32 %p1, %warp, 0;
@%p1 bra CONSUMER;
st.shared.u32 [%own+1024], 5;
mbarrier.arrive.shared.b64 %rd0, [%base]; //!
bra DONE;
CONSUMER:
WAIT:
mbarrier.try_wait.parity.shared.b64 %p2, [%base], 0; //wait
@!%p2 bra WAIT; //wait
ld.shared.u32 %r0, [%other+1024];
st.global.u32 [%mine], %r0;
DONE:
"""
)


def test_mbarriers_order_accesses():
    passes(HAND_OVER)
    faults(without(HAND_OVER), "deadlock")
    # Polling with test_wait is equivalent to try_wait.
    for seed in SEEDS[:4]:
        launch(HAND_OVER.replace("try_wait", "test_wait"), seed=seed)


def test_not_waiting_for_an_mbarrier_is_a_race():
    filled = HAND_OVER.replace("bar.sync 0;", "st.shared.u32 [%own+1024], 1;\nbar.sync 0;")
    check_rule(filled, "race", mark="//wait")
    # The phase before the first is complete; once the first is complete, this waits for the second.
    faults(filled.replace("[%base], 0", "[%base], 1"), ("race", "deadlock"))


def test_mbarriers_must_be_initialized_before_use():
    faults(without(HAND_OVER, "//init"), ("race", "uninitialized"))


def test_mbarrier_phases_alternate():
    once = """
    mbarrier.arrive.shared.b64 %rd0, [%base];
    WAIT:
    mbarrier.try_wait.parity.shared.b64 %p2, [%base], PARITY;
    @!%p2 bra WAIT;
    """
    body = BARRIER
    for phase in range(5):
        body += once.replace("PARITY", str(phase % 2)).replace("WAIT", f"WAIT{phase}")
    passes(body, threads=32)
    faults(body + once.replace("PARITY", "0"), "deadlock", threads=32)
    states = BARRIER + "mbarrier.arrive.shared.b64 %rd0, [%base];\nAGAIN:\n"
    states += "mbarrier.try_wait.shared.b64 %p2, [%base], %rd0;\n@!%p2 bra AGAIN;"
    passes(states, threads=32)


def test_excess_arrivals_fault():
    body = BARRIER.replace("], 32", "], 63") + "mbarrier.arrive.shared.b64 %rd0, [%base], 2;"
    faults(body, "invalid", "more arrivals", threads=32)
    passes(body.replace("], 63", "], 64"), threads=32)


def test_expected_bytes_must_arrive():
    body = (
        BARRIER.replace("], 32", "], 1")
        + """
    @%p0 bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 %rd0, [%base], 64;
    mbarrier.complete_tx.shared.b64 [%base], 64; //!
    WAIT:
    mbarrier.try_wait.parity.shared.b64 %p2, [%base], 0;
    @!%p2 bra WAIT;"""
    )
    check_rule(body, "deadlock")
    faults(body.replace("[%base], 64; //!", "[%base], 48;"), "deadlock")


def test_copies_arrive_at_an_mbarrier_when_they_are_complete():
    body = (
        BARRIER
        + """
    setp.ne.u32 %p1, %warp, 0;
    @%p1 bra CONSUMER;
    cp.async.ca.shared.global [%own+1024], [%mine], 4;
    cp.async.mbarrier.arrive.noinc.shared.b64 [%base];
    bra DONE;
    CONSUMER:
    mbarrier.try_wait.parity.shared.b64 %p2, [%base], 0; //!
    @!%p2 bra CONSUMER; //!
    ld.shared.u32 %r0, [%other+1024];
    st.global.u32 [%mine], %r0;
    DONE:"""
    )
    for seed in SEEDS:
        out = np.arange(4096, dtype=np.uint32) + 7
        launch(body, seed=seed, out=out)
        np.testing.assert_array_equal(out[32:64], out[:32])
    filled = body.replace("bar.sync 0;", "st.shared.u32 [%own+1024], 1;\nbar.sync 0;")
    faults(without(filled), "race")
