"""torch.autocast: what it casts are q, k and v, and never what a bias is computed from."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def under_autocast(*tensors):
    """The tensors, cast where autocast is on for the device of the first."""
    first = tensors[0]
    if torch.is_tensor(first) and _is_on(first.device.type):
        return tuple(_cast(x) for x in tensors)
    return tensors


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A context in which operations on a device have the dtypes of their arguments."""
    # Without autocast it is much faster to enter nothing.
    return torch.autocast(device.type, enabled=False) if _is_on(device.type) else nullcontext()


def _is_on(device_type: str) -> bool:
    # torch.compile of PyTorch 2.11 cannot trace torch.amp.is_autocast_available.
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def _cast(x):
    if not torch.is_tensor(x) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))
