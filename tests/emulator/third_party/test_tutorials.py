"""Kernels with the techniques of Triton's tutorials agree with PyTorch in the emulator."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs Triton")

from tests.emulator.third_party import tutorial_launches as launches
from tests.emulator.third_party.launches import execute
from tests.support.numerics import assert_close_to_float64

LAUNCHES = [
    launches.softmax,
    launches.product_with_eight_warps,
    launches.product_with_four_warps,
    launches.product_of_float8,
    launches.persistent_product,
    launches.layer_norm_gradients,
    launches.causal_attention,
    launches.bidirectional_attention,
]


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("make", LAUNCHES, ids=lambda make: make.__name__)
def test_kernel_agrees_with_pytorch(make, arch, seed):
    launch = make()
    execute(launch, arch, seed)
    for parameter, (exact, plain) in launch.expected.items():
        actual = launch.arguments[parameter]
        actual = getattr(actual, "base", actual)  # of a descriptor
        assert_close_to_float64(actual, exact, plain, parameter, exact.abs())
