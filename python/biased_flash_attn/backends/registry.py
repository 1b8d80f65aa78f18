"""The registry of backends, and the choice of the backend that runs a call."""

from __future__ import annotations

import warnings

from ..problem import Problem
from .cpu import Cpu
from .cuda import Cuda
from .protocol import ATTENTION, Backend, Report
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


def choose(backend: str | None, problem: Problem, call: str = ATTENTION) -> str:
    """Returns the name of the backend that computes a problem, or a call that consists of such
    problems: the named one or, if that is None, the best one.

    call: its kind, one of `protocol`.

    Raises:
        RefusedError: if the named backend, or any backend, cannot compute it.
        ValueError: if there is no backend of this name.
    """
    if backend is None:
        return _best(problem, call)
    if backend not in NAMES:
        *others, last = map(repr, (None, *NAMES))
        raise ValueError(f"backend is {backend!r}; it may be {', '.join(others)} or {last}")
    if reason := _refusal(get(backend), problem, call):
        raise RefusedError(reason)
    return backend


def _refusal(backend: Backend, problem: Problem, call: str) -> str:
    """The reason why a backend cannot compute a problem, with its name, or an empty string."""
    if call in backend.calls:
        reason = backend.refusal(problem)
    else:
        *able, last = [repr(name) for name, x in _BACKENDS.items() if call in x.calls]
        reason = f"does not compute {call}; it may be {', '.join(able)} or {last}"
    return reason and f"backend={backend.name!r} {reason}"


def _best(problem: Problem, call: str) -> str:
    """The first backend for q's device that does not refuse a problem, or else the reference."""
    reasons = []
    for backend in _BACKENDS.values():
        if backend.device_type == problem.q.device.type:
            reason = _refusal(backend, problem, call)
            if not reason:
                return backend.name
            reasons.append(reason)
    if reason := _refusal(_REFERENCE, problem, call):
        raise RefusedError("; ".join([*reasons, reason]))
    if reasons:
        warnings.warn(
            f"running on the reference backend, in O(N^2) memory: {'; '.join(reasons)}",
            stacklevel=7,  # the caller of biased_flash_attn or of a step of decoding
        )
    return _REFERENCE.name
