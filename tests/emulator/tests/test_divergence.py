"""Divergence and reconvergence of lanes, and the location of faults."""

from __future__ import annotations

import numpy as np
import pytest

from tests import emulator
from tests.emulator.tests.kernels import kernel_of
from tests.emulator.tests.rules import PRELUDE, faults, launch, passes


@pytest.mark.parametrize(
    "body",
    [
        "setp.lt.u32 %p0, %lane, 7;\n@%p0 bar.sync 0;",
        "setp.lt.u32 %p0, %lane, 7;\n@%p0 bra.uni THERE;\nTHERE:",
        "shfl.sync.idx.b32 %r0, %tid, 9, 31, 255;",  # lanes outside their mask
        # A missing lane.
        "setp.lt.u32 %p0, %lane, 7;\n@%p0 shfl.sync.idx.b32 %r0, %tid, 9, 31, 127;",
    ],
)
def test_aligned_instructions_need_converged_lanes(body):
    faults(body, "divergence")


def test_lanes_reconverge_after_different_branches():
    body = """
    setp.lt.u32 %p0, %lane, 7;
    @%p0 bra THERE;
    st.shared.u32 [%own], 1;
    bra MEET;
    THERE:
    st.shared.u32 [%own], 2;
    MEET:
    bar.sync 0;
    ld.shared.u32 %r0, [%other];"""
    passes(body)
    apart = "setp.lt.u32 %p0, %lane, 7;\n@%p0 bra THERE;\nbar.sync 0;\nret;\nTHERE:\nbar.sync 0;"
    faults(apart, "deadlock")


def test_shuffles_wait_for_all_their_members():
    body = (
        "setp.lt.u32 %p0, %lane, 7;\n@%p0 bra DONE;\nshfl.sync.idx.b32 %r0, %tid, 9, 31, -1;\nDONE:"
    )
    passes(body)  # does not wait for lanes that exited
    waiting = "setp.lt.u32 %p0, %lane, 7;\nSTAY:\n@%p0 bra STAY;\nvote.sync.any.pred %p1, %p0, -1;"
    with pytest.raises(emulator.Fault) as found:
        launch(waiting, threads=32)
    assert found.value.kind == "deadlock"


def test_lanes_may_wait_for_other_lanes_of_their_warp():
    body = """
    st.volatile.shared.u32 [%base], 0;
    bar.sync 0;
    setp.ne.u32 %p0, %lane, 9;
    @%p0 bra WAIT;
    bra AHEAD;
    WAIT:
    ld.volatile.shared.u32 %r0, [%base];
    setp.eq.u32 %p1, %r0, 0;
    @%p1 bra WAIT;
    bra DONE;
    AHEAD:
    st.volatile.shared.u32 [%base], 1;
    DONE:"""
    for seed in range(3):
        launch(body, threads=32, seed=seed)


def test_a_trap_ends_the_launch():
    fault = faults("setp.eq.u32 %p0, %tid, 37;\n@%p0 trap;", "trap")
    assert (fault.warp, fault.lane) == (1, 5)


def test_unknown_instructions_fault_when_executed():
    passes(
        "setp.eq.u32 %p0, %tid, 99;\n@%p0 bra NEVER;\nbra DONE;\nNEVER:\nfrobnicate.u32 %r0;\nDONE:"
    )
    faults("frobnicate.u32 %r0;", "unsupported", "frobnicate.u32 is not supported")


def test_faults_contain_their_location():
    text = (
        PRELUDE
        + ".loc 1 42 7\nadd.u32 %r9, %tid, 0;\n.loc 1 43 7\nst.global.u32 [%mine+12], %r9;\nret;"
    )
    kernel = kernel_of(text, [".param .u64 out"])
    kernel = emulator.parse(
        '.file 1 "somewhere/source.py"\n'
        f".visible .entry writes_beyond(.param .u64 out)\n{{\n{text}\n}}\n"
    ).kernels["writes_beyond"]
    out = np.zeros(64, np.uint32)
    with pytest.raises(emulator.Fault) as found:
        emulator.launch(kernel, (1, 2, 3), [out[:0]], block=(64,), memory=[out[:63]])
    fault = found.value
    assert (fault.kernel, fault.kind, fault.lane >= 0) == ("writes_beyond", "out of bounds", True)
    assert fault.source == "source.py:43"
    assert fault.text.startswith("st.global.u32")
    for word in (
        "writes_beyond",
        f"line {fault.line}",
        "source.py:43",
        fault.block,
        "warp",
        "lane",
        f"{fault.address:#x}",
    ):
        assert word in str(fault)
