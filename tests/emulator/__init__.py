"""Executes PTX on the CPU, and is stricter than hardware about what kernels may do.

`parse` takes the text that Triton or NVRTC generated, `launch` runs a kernel of it on tensors in
CPU memory. What hardware would let slip raises a `Fault`: races, reads of memory that nothing
wrote, accesses outside the tensors, registers of products that are still in flight, deadlocks.
"""

import sys

from .build import load_core

sys.modules[f"{__name__}._core"] = load_core()

from .execution import Counts, Fault, launch  # noqa: E402
from .parser import Kernel, Module, parse  # noqa: E402
from .tensor_map import TensorMap  # noqa: E402

__all__ = ["Counts", "Fault", "Kernel", "Module", "TensorMap", "launch", "parse"]
