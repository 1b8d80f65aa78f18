"""The CUDA C++ kernels as a backend. Their launch code is in `cuda_kernels`."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import tracing
from ..cuda_kernels import forms, nvrtc
from ..cuda_kernels.backward import backward
from ..cuda_kernels.driver import CudaDriver
from ..cuda_kernels.forward import forward
from ..cuda_kernels.launch import Launcher
from ..cuda_kernels.variants import ELEMENTS
from ..problem import Problem
from .protocol import ATTENTION, Report, too_wide

# The forward kernel divides the bias by the scale, and compares products before it scales them.
SMALLEST_SCALE = 1e-9
_CHANNELS = 8  # those of 16 bytes, by which the addresses of rows are aligned


class Cuda:
    """CUDA C++ kernels for Hopper, in half precision."""

    name = "cuda"
    # The device type of tensors; tests that emulate a GPU set it to "cpu", and another launcher.
    device_type = "cuda"
    has_kernels = True
    calls = frozenset({ATTENTION})

    def __init__(self):
        self.launcher = Launcher(CudaDriver())

    def report(self) -> Report:
        reason = nvrtc.missing()
        if not reason and not torch.cuda.is_available():
            reason = "torch finds no GPU, or is a build without GPUs"
        if reason := reason or self.launcher.driver.refusal(torch.device("cuda")):
            return Report(self.name, False, reason)
        detail = f"{torch.cuda.get_device_name()}; for bfloat16 and float16"
        return Report(self.name, True, detail)

    def refusal(self, problem: Problem) -> str:
        q = problem.q
        if q.dtype not in ELEMENTS:
            return f"has no {str(q.dtype).removeprefix('torch.')}; q may be bfloat16 or float16"
        if q.device.type != self.device_type:
            return f"needs tensors on {self.device_type}; q is on {q.device}"
        if reason := too_wide(problem) or self._unsupported(q.device):
            return reason
        if reason := forms.refusal(problem):
            return reason
        if problem.scale < SMALLEST_SCALE:
            return f"needs a scale of at least {SMALLEST_SCALE:.0e}; it is {problem.scale}"
        for name, x in (("q", problem.q), ("v", problem.v)):
            if x.shape[3] % _CHANNELS:
                return f"needs a head_dim that is a multiple of 8; {name} has {x.shape[3]}"
        return ""

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return forward(self.launcher, problem)

    def backward(
        self, problem: Problem, *results, targets: list[int]
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        return backward(self.launcher, problem, *results, bool(targets))

    def trim(self, problem: Problem, near, fraction, reach, from_end: bool) -> Tensor:
        """Removes no key."""
        return problem.plan[int(from_end)]

    @tracing.constant
    def _unsupported(self, device: torch.device) -> str:
        missing = nvrtc.missing()
        return f"is not available: {missing}" if missing else self.launcher.driver.refusal(device)
