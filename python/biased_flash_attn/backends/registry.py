"""The registry of backends, and the choice of the backend that runs a call."""

from __future__ import annotations

import warnings

from torch import Tensor

from .cpu import Cpu
from .protocol import Backend, Report
from .reference import Reference
from .triton import Triton

_REFERENCE = Reference()
# In the order in which they are preferred on a device.
_BACKENDS: dict[str, Backend] = {x.name: x for x in (Cpu(), Triton(), _REFERENCE)}
NAMES = tuple(_BACKENDS)


def get(name: str) -> Backend:
    """Returns the backend with this name."""
    return _BACKENDS[name]


def report() -> list[Report]:
    """Returns one report per backend."""
    return [backend.report() for backend in _BACKENDS.values()]


def choose(q: Tensor, backend: str | None) -> str:
    """Returns the name of the backend that runs calls with q; raises ValueError if a named backend
    cannot."""
    if backend is None:
        return _best(q)
    if backend not in NAMES:
        *others, last = map(repr, (None, *NAMES))
        raise ValueError(f"backend is {backend!r}; it may be {', '.join(others)} or {last}")
    if reason := get(backend).refusal(q):
        raise ValueError(f"backend={backend!r} {reason}")
    return backend


def _best(q: Tensor) -> str:
    """The first backend for q's device that does not refuse it, or else the reference."""
    reasons = []
    for backend in _BACKENDS.values():
        if backend.device_type == q.device.type:
            reason = backend.refusal(q)
            if not reason:
                return backend.name
            reasons.append(f"backend={backend.name!r} {reason}")
    if reasons:
        warnings.warn(
            f"running on the reference backend, in O(N^2) memory: {'; '.join(reasons)}",
            stacklevel=5,
        )
    return _REFERENCE.name
