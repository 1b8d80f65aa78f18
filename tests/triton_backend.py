"""The Triton backend where tests run: on a GPU or, where there is none, interpreted."""

from __future__ import annotations

import functools

import pytest

from biased_flash_attn import backends
from cases import fused

KERNELS = backends.kernels("triton")
Config = KERNELS and KERNELS.Config
INTERPRETED = KERNELS is None or KERNELS.INTERPRETED
# Of every module of tests that runs kernels.
MARKS = [
    pytest.mark.skipif(KERNELS is None, reason="needs Triton"),
    pytest.mark.usefixtures("on_the_device_of_triton", "quick_and_strict_interpreter"),
    # The interpreter computes with NumPy, which speaks of infinities that are meant.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

attend = functools.partial(fused, backend="triton")
