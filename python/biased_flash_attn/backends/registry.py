"""The registry of backends, and the choice of the backend that runs a call."""

from __future__ import annotations

import warnings

from torch import Tensor

from ..problem import Problem
from .cpu import Cpu
from .cuda import Cuda
from .protocol import Backend, Report
from .reference import Reference
from .triton import Triton

_REFERENCE = Reference()
# In the order in which they are preferred on a device.
_BACKENDS: dict[str, Backend] = {x.name: x for x in (Cpu(), Cuda(), Triton(), _REFERENCE)}
NAMES = tuple(_BACKENDS)


def get(name: str) -> Backend:
    """Returns the backend with this name."""
    return _BACKENDS[name]


def report() -> list[Report]:
    """Returns one report per backend."""
    return [backend.report() for backend in _BACKENDS.values()]


class RefusedError(ValueError):
    """A named backend cannot compute a call."""


def choose(q: Tensor, backend: str | None, problem: Problem | None = None) -> str:
    """Returns the name of the backend that computes a call: the named one or, if that is None, the
    best one.

    problem: the call's, with this q; None if it consists of several problems of any kind.

    Raises:
        RefusedError: if the named backend cannot compute it.
        ValueError: if there is no backend of this name.
    """
    if backend is None:
        return _best(q, problem)
    if backend not in NAMES:
        *others, last = map(repr, (None, *NAMES))
        raise ValueError(f"backend is {backend!r}; it may be {', '.join(others)} or {last}")
    if reason := get(backend).refusal(q, problem):
        raise RefusedError(f"backend={backend!r} {reason}")
    return backend


def _best(q: Tensor, problem: Problem | None) -> str:
    """The first backend for q's device that does not refuse it, or else the reference."""
    reasons = []
    for backend in _BACKENDS.values():
        if backend.device_type == q.device.type:
            reason = backend.refusal(q, problem)
            if not reason:
                return backend.name
            reasons.append(f"backend={backend.name!r} {reason}")
    if reasons:
        warnings.warn(
            f"running on the reference backend, in O(N^2) memory: {'; '.join(reasons)}",
            stacklevel=5,
        )
    return _REFERENCE.name
