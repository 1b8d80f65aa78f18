"""Which backends this machine has, and why not: the one place that knows."""

from __future__ import annotations

import contextlib
import platform
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

NAMES = ("cpu", "reference")


@dataclass(frozen=True)
class Report:
    """What `python -m biased_flash_attn info` shows of a backend."""

    name: str
    available: bool
    detail: str  # what it runs on or, where it is missing, why and what to do


def _load_cpu_kernels() -> tuple[ModuleType | None, str]:
    """The module of the C++ kernels, or None and why it is missing."""
    try:
        from . import cpu
    except ImportError as error:
        record = Path(__file__).with_name("_build_error.txt")
        reason = record.read_text().strip() if record.exists() else str(error)
        return None, (
            f"the C++ kernels were not built: {reason}\n"
            "install GCC 11 or Clang 14, or newer, with OpenMP and reinstall the package"
        )
    return cpu, ""


_CPU_KERNELS, _CPU_KERNELS_MISSING = _load_cpu_kernels()


def report() -> list[Report]:
    """One report per backend, best first."""
    if _CPU_KERNELS is None:
        cpu = Report("cpu", False, _CPU_KERNELS_MISSING)
    else:
        extension = _CPU_KERNELS._C
        supported = ", ".join(extension.instruction_sets())
        detail = (
            f"{extension.instruction_set()} kernels on {torch.get_num_threads()} threads"
            f" ({platform.machine()}; built in and supported: {supported})"
        )
        cpu = Report("cpu", True, detail)
    return [cpu, Report("reference", True, "plain PyTorch on any device; O(N^2) memory")]


def choose(q: Tensor, backend: str | None) -> str:
    """The backend that runs q; a named one runs or raises."""
    if backend is None:
        if q.device.type != "cpu":
            return "reference"
        if _CPU_KERNELS is None:
            warnings.warn(
                f"running on the reference backend, in O(N^2) memory: {_CPU_KERNELS_MISSING}",
                stacklevel=3,
            )
            return "reference"
        return "cpu"
    if backend not in NAMES:
        raise ValueError(f"backend is {backend!r}; it may be None, {' or '.join(map(repr, NAMES))}")
    if backend == "cpu":
        if q.device.type != "cpu":
            raise ValueError(f"backend='cpu' needs tensors on the CPU; q is on {q.device}")
        if _CPU_KERNELS is None:
            raise ValueError(f"backend='cpu' is not available: {_CPU_KERNELS_MISSING}")
    return backend


def kernels(backend: str) -> ModuleType:
    """The module with `forward` and `backward` of a backend that has kernels."""
    return {"cpu": _CPU_KERNELS}[backend]


def release_memory() -> None:
    """Gives back to the system what the CPU kernels keep from one call for the next."""
    if _CPU_KERNELS is not None:
        _CPU_KERNELS._C.release_memory()


@contextlib.contextmanager
def instruction_set(name: str):
    """Within the block the CPU kernels use the named instruction set, as tests and benchmarks ask.

    Raises:
        ValueError: naming the sets that run here.
    """
    from . import _C

    before = _C.instruction_set()
    _C.use_instruction_set(name)
    try:
        yield
    finally:
        _C.use_instruction_set(before)
