"""The Triton backend where tests run: on a GPU or, where there is none, emulated."""

from __future__ import annotations

import functools

import pytest
import torch

from biased_flash_attn import backends
from tests.support.problems import fused

TRITON = backends.get("triton")
KERNELS = None if TRITON.missing else TRITON.kernels
Config = KERNELS and KERNELS.attention.Config
EMULATED = not torch.cuda.is_available()
# Of every module of tests that runs kernels.
MARKS = [
    pytest.mark.kernels,
    pytest.mark.skipif(KERNELS is None, reason="needs Triton"),
    pytest.mark.usefixtures("gpu"),
]

attend = functools.partial(fused, backend="triton")
