"""Executes PTX on the CPU, and is stricter than hardware about what kernels may do.

`parse` reads the text that Triton or NVRTC generates, and `launch` runs one of its kernels on
tensors in CPU memory. Errors that hardware may not report raise a `Fault`: races, uninitialized
reads, accesses outside the tensors, accesses to registers of products in flight, deadlocks.
"""

import sys

from .build import load_core

sys.modules[f"{__name__}._core"] = load_core()

from .execution import Counts, Fault, launch  # noqa: E402
from .parser import Kernel, Module, parse  # noqa: E402
from .tensor_map import TensorMap  # noqa: E402

__all__ = ["Counts", "Fault", "Kernel", "Module", "TensorMap", "launch", "parse"]
