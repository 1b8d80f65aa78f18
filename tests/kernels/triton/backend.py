"""The Triton backend as tests run it: on a GPU or, without one, in the emulator."""

from __future__ import annotations

import functools
from importlib import import_module

import pytest
import torch

from biased_flash_attn import backends
from tests.support.problems import fused

TRITON = backends.get("triton")
KERNELS = None if TRITON.missing else TRITON.kernels
# The forms that the kernels compute.
KERNEL_FORMS = KERNELS and import_module("biased_flash_attn.triton_kernels.forms")
Config = KERNELS and KERNELS.attention.Config
EMULATED = not torch.cuda.is_available()
# The marks of every test module that runs kernels.
MARKS = [
    pytest.mark.kernels,
    pytest.mark.skipif(KERNELS is None, reason="needs Triton"),
    pytest.mark.usefixtures("gpu"),
]

attend = functools.partial(fused, backend="triton")
