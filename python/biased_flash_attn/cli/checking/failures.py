"""Errors that may occur while kernels are compiled and run."""

from __future__ import annotations

import torch

try:
    from triton.errors import TritonError
except ImportError:  # Triton is not installed
    TritonError = RuntimeError

# Errors of PyTorch, of the compiler, and of launches that exceed the resources of the GPU.
KERNEL_ERRORS = (RuntimeError, TritonError)
LONGEST = 300


def is_out_of_memory(error: Exception) -> bool:
    """Whether the memory of the GPU or of the system was exhausted."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def described(error: Exception) -> str:
    """The kind of an error and the first line of its message."""
    first_line = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {first_line}"[:LONGEST]
