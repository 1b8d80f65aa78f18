"""The Triton backend on an emulated GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from biased_flash_attn import backends
from tests.emulator.triton_device import Device, installed


@contextlib.contextmanager
def emulated(device: Device) -> Iterator[None]:
    """Within the context, backend="triton" accepts CPU tensors and runs on the device."""
    with mock.patch.object(backends.get("triton"), "device_type", "cpu"), installed(device):
        yield
