"""What can go wrong while kernels are compiled and run, apart from wrong results."""

from __future__ import annotations

import torch

try:
    from triton.errors import TritonError
except ImportError:  # without Triton nothing raises it
    TritonError = RuntimeError

# Errors of PyTorch, of the compiler, and of a launch that asks for more than a GPU has.
KERNEL_ERRORS = (RuntimeError, TritonError)
LONGEST = 300


def is_out_of_memory(error: Exception) -> bool:
    """Whether the GPU's memory or the system's did not suffice."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def described(error: Exception) -> str:
    """The kind of an error and the first line of its message."""
    first_line = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {first_line}"[:LONGEST]
