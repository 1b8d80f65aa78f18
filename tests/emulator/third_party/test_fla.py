"""The results of fla-core's Triton kernels in the emulator follow their formulas."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="needs Triton")

from tests.emulator import Fault
from tests.emulator.third_party.fla_launches import gradients
from tests.emulator.third_party.launches import compiled, execute, launches_of
from tests.support.numerics import assert_close_to_float64

LAUNCHES = launches_of("tests.emulator.third_party.fla_launches")


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", LAUNCHES)
def test_kernel_of_fla_agrees_with_its_formula(name, arch, seed):
    launch = LAUNCHES[name]()
    execute(launch, arch, seed)
    for parameter, (exact, plain) in launch.expected.items():
        what, actual = f"{name}: {parameter}", launch.arguments[parameter]
        assert_close_to_float64(actual, exact, plain, what, exact.abs())


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_are_refilled_before_products_have_read_them(stages, seed):
    """An iteration commits four groups of products and then waits until at most four are in flight,
    which is no wait. It copies the next `h` and `dh` to where these products read the present ones.

    With a release of Triton that waits, `gradients` may have several stages.
    """
    launch = replace(gradients(), options={"num_warps": 4, "num_stages": stages})
    with pytest.raises(Fault) as found:
        execute(launch, 90, seed)
    assert found.value.kind == "race"
    assert found.value.text.startswith("cp.async")
    before = compiled(launch, 90).asm["ptx"].splitlines()[: found.value.line]
    loop = "\n".join(before).rpartition("Loop Header")[2]
    assert loop.count("wgmma.commit_group") == 4
    assert re.findall(r"wgmma\.wait_group\S* \t?(\d+)", loop) == ["4"]
