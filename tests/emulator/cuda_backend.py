"""The CUDA backend on an emulated GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from biased_flash_attn import backends
from biased_flash_attn.cuda_kernels.launch import Launcher


@contextlib.contextmanager
def emulated(launcher: Launcher) -> Iterator[None]:
    """Within the context, backend="cuda" accepts CPU tensors, and launches kernels by a driver that
    emulates a GPU."""
    with mock.patch.multiple(backends.get("cuda"), device_type="cpu", launcher=launcher):
        yield
