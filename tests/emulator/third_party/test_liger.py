"""The results of liger-kernel's Triton kernels in the emulator equal those of PyTorch."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs Triton")

from tests.emulator.third_party.launches import execute, launches_of
from tests.support.numerics import assert_close_to_float64

LAUNCHES = launches_of("tests.emulator.third_party.liger_launches")


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", LAUNCHES)
def test_kernel_of_liger_agrees_with_pytorch(name, arch, seed):
    launch = LAUNCHES[name]()
    execute(launch, arch, seed)
    for parameter, (exact, plain) in launch.expected.items():
        what, actual = f"{name}: {parameter}", launch.arguments[parameter]
        assert_close_to_float64(actual, exact, plain, what, exact.abs())
