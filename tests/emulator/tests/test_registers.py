"""setmaxnreg moves registers between the warp groups of a block."""

from __future__ import annotations

import pytest

from tests import emulator
from tests.emulator.tests.kernels import kernel_of
from tests.emulator.tests.rules import SEEDS

# The first of two groups releases what the second one claims. At first each thread has as many
# registers as .maxnreg says, or 256: then the threads have all 65536.
GROUPS = """
.reg .b32 %tid;
.reg .pred %second;
mov.u32 %tid, %tid.x;
setp.ge.u32 %second, %tid, 128;
@%second bra SECOND;
setmaxnreg.dec.sync.aligned.u32 {released};
ret;
SECOND:
setmaxnreg.inc.sync.aligned.u32 {claimed};
ret;
"""


def run(body: str, seed: int, directives: str = ".maxnreg 128") -> None:
    kernel = kernel_of(body, directives=f".reqntid 256 {directives}")
    emulator.launch(kernel, (1,), [], seed=seed)


def fault_of(body: str, seed: int, **options) -> emulator.Fault:
    with pytest.raises(emulator.Fault) as found:
        run(body, seed, **options)
    return found.value


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_wait_for_released_registers(seed):
    run(GROUPS.format(released=24, claimed=232), seed)
    fault = fault_of(GROUPS.format(released=32, claimed=232), seed)
    assert fault.kind == "deadlock"
    assert "setmaxnreg.inc" in str(fault)


def test_launch_bounds_determine_the_registers_at_first():
    for seed in SEEDS:
        body = GROUPS.format(released=24, claimed=232)
        run(body, seed, directives=".minnctapersm 2")
        assert fault_of(body, seed, directives=".minnctapersm 3").kind == "deadlock"  # 80 registers
        assert fault_of(body, seed, directives="").kind == "invalid"  # 256 are more than 232


def test_numbers_change_in_the_direction_of_the_instruction():
    assert fault_of(GROUPS.format(released=136, claimed=136), 0).kind == "invalid"
    assert fault_of(GROUPS.format(released=128, claimed=120), 0).kind == "invalid"
    run(GROUPS.format(released=128, claimed=128), 0)


@pytest.mark.parametrize(("released", "claimed"), [(16, 128), (100, 128), (24, 264)])
def test_numbers_are_multiples_of_8_from_24_to_256(released, claimed):
    fault = fault_of(GROUPS.format(released=released, claimed=claimed), 0)
    assert "multiple of 8 from 24 to 256" in str(fault)


def test_without_launch_bounds_the_instruction_has_no_effect():
    kernel = kernel_of(GROUPS.format(released=24, claimed=256))
    emulator.launch(kernel, (1,), [], block=(256,))


ONE_GROUP = """
.reg .b32 %tid;
.reg .pred %first;
mov.u32 %tid, %tid.x;
setp.lt.u32 %first, %tid, 32;
{body}
ret;
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_warps_of_a_group_change_their_registers_together(seed):
    first, second = (f"setmaxnreg.dec.sync.aligned.u32 {n};" for n in (64, 32))
    run(ONE_GROUP.format(body=f"{first}\nbar.sync 0;\n{second}"), seed)
    for wrong in (
        f"{first}\n{second}",
        f"@%first {first}\nbar.sync 0;\n{second}",
        f"@%first {first}",
    ):
        assert fault_of(ONE_GROUP.format(body=wrong), seed).kind == "divergence"
