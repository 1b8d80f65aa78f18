"""The Triton kernels of liger-kernel compute in the emulator what PyTorch computes."""

from __future__ import annotations

import liger_launches
import pytest
from peer_kernels import compile_all, execute, launches_of

from numerics import assert_close_to_float64

pytest.importorskip("triton", reason="needs Triton")
LAUNCHES = launches_of("liger_launches")


@pytest.fixture(scope="module", params=(80, 90), ids="sm_{}".format)
def compiled(request):
    return compile_all(liger_launches.__name__, request.param)


@pytest.mark.parametrize("name", LAUNCHES)
def test_kernel_of_liger_agrees_with_pytorch(name, compiled, seed):
    launch = LAUNCHES[name]()
    execute(compiled[name], launch, seed)
    for parameter, (exact, plain) in launch.expected.items():
        assert_close_to_float64(launch.arguments[parameter], exact, plain, f"{name}: {parameter}")
