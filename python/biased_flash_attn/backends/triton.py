"""The Triton kernels as a backend. Their launch code is in `triton_kernels`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import Problem
from ..triton_kernels.refusals import OLDEST
from .protocol import ATTENTION, CONTEXT_PARALLELISM, DECODING, Report, too_wide


class Triton:
    """Triton kernels for GPUs. They do not support float64."""

    name = "triton"
    # The device type of tensors; tests that emulate a GPU set it to "cpu".
    device_type = "cuda"
    has_kernels = True
    calls = frozenset({ATTENTION, DECODING, CONTEXT_PARALLELISM})

    def __init__(self):
        self.missing = ""
        try:
            from ..triton_kernels import launch
        except (ImportError, AttributeError) as error:  # the latter from a Triton that is too old
            self.missing = f"{error}\ninstall triton {OLDEST} or newer: pip install triton"
        else:
            self.kernels = launch

    def report(self) -> Report:
        reason = self.missing
        if not reason and not torch.cuda.is_available():
            reason = "torch finds no GPU, or is a build without GPUs"
        if reason := reason or self.kernels.unsupported(torch.device("cuda")):
            return Report(self.name, False, reason)
        return Report(self.name, True, f"{torch.cuda.get_device_name()}; not for float64")

    def refusal(self, problem: Problem) -> str:
        q = problem.q
        if self.missing:
            return f"is not available: {self.missing}"
        if q.dtype == torch.float64:
            return "has no float64; q may be float32, bfloat16 or float16"
        if q.device.type != self.device_type:
            return f"needs tensors on {self.device_type}; q is on {q.device}"
        return too_wide(problem) or self.kernels.unsupported(q.device)

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.kernels.forward(problem)

    def backward(
        self, problem: Problem, *results, targets: list[int]
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        return self.kernels.backward(problem, *results, bool(targets))

    def trim(self, problem: Problem, *what) -> Tensor:
        return self.kernels.trim(problem, *what)

    def decode(self, problem: Problem) -> tuple[Tensor, Tensor]:
        return self.kernels.decode(problem)

    def append(self, pages: Tensor, rows: Tensor, block_table: Tensor, lengths: Tensor) -> None:
        self.kernels.append(pages, rows, block_table, lengths)
