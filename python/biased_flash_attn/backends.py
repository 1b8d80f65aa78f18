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

NAMES = ("triton", "cpu", "reference")
_REFERENCE_DETAIL = "plain PyTorch on any device; O(N^2) memory"


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


def _load_triton_kernels() -> tuple[ModuleType | None, str]:
    """The module that starts the Triton kernels, or None and why it is missing."""
    try:
        from .triton_kernels import launch
    except (ImportError, AttributeError) as error:  # the latter from a Triton that is too old
        return None, f"{error}\ninstall triton 3.6 or newer: pip install triton"
    return launch, ""


_CPU_KERNELS, _CPU_KERNELS_MISSING = _load_cpu_kernels()
_TRITON_KERNELS, _TRITON_KERNELS_MISSING = _load_triton_kernels()


def report() -> list[Report]:
    """One report per backend."""
    return [_report_triton(), _report_cpu(), Report("reference", True, _REFERENCE_DETAIL)]


def _report_triton() -> Report:
    if _TRITON_KERNELS is None:
        return Report("triton", False, _TRITON_KERNELS_MISSING)
    if not torch.cuda.is_available():
        return Report("triton", False, "torch finds no GPU, or is a build without GPUs")
    if reason := _TRITON_KERNELS.unsupported(torch.device("cuda")):
        return Report("triton", False, reason)
    return Report("triton", True, f"{torch.cuda.get_device_name()}; not for float64")


def _report_cpu() -> Report:
    if _CPU_KERNELS is None:
        return Report("cpu", False, _CPU_KERNELS_MISSING)
    extension = _CPU_KERNELS._C
    supported = ", ".join(extension.instruction_sets())
    detail = (
        f"{extension.instruction_set()} kernels on {torch.get_num_threads()} threads"
        f" ({platform.machine()}; built in and supported: {supported})"
    )
    return Report("cpu", True, detail)


def choose(q: Tensor, backend: str | None) -> str:
    """The backend that runs q; a named one runs or raises."""
    if backend is None:
        return _best(q)
    if backend not in NAMES:
        raise ValueError(f"backend is {backend!r}; it may be None, {' or '.join(map(repr, NAMES))}")
    if backend == "triton" and (reason := _refusal_of_triton(q)):
        raise ValueError(f"backend='triton' {reason}")
    if backend == "cpu":
        if q.device.type != "cpu":
            raise ValueError(f"backend='cpu' needs tensors on the CPU; q is on {q.device}")
        if _CPU_KERNELS is None:
            raise ValueError(f"backend='cpu' is not available: {_CPU_KERNELS_MISSING}")
    return backend


def _best(q: Tensor) -> str:
    if q.device.type == "cpu":
        if _CPU_KERNELS is not None:
            return "cpu"
        _warn_of_reference(_CPU_KERNELS_MISSING)
    elif q.device.type == "cuda":
        reason = _refusal_of_triton(q)
        if not reason:
            return "triton"
        _warn_of_reference(f"backend='triton' {reason}")
    return "reference"


def _warn_of_reference(reason: str) -> None:
    warnings.warn(f"running on the reference backend, in O(N^2) memory: {reason}", stacklevel=5)


def _refusal_of_triton(q: Tensor) -> str:
    """Why the Triton kernels cannot run q, or nothing."""
    if _TRITON_KERNELS is None:
        return f"is not available: {_TRITON_KERNELS_MISSING}"
    if q.dtype == torch.float64:
        return "has no float64; q may be float32, bfloat16 or float16"
    device = _TRITON_KERNELS.DEVICE_TYPE
    if q.device.type != device:
        return f"needs tensors on {device}; q is on {q.device}"
    return _TRITON_KERNELS.unsupported(q.device)


def kernels(backend: str) -> ModuleType:
    """The module with `forward`, `backward` and so on of a backend that has kernels."""
    return {"triton": _TRITON_KERNELS, "cpu": _CPU_KERNELS}[backend]


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
