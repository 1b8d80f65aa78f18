"""Compiler options of the kernels, and the device on which they are launched."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial, wraps

import torch
from torch import Tensor

from ...problem import Problem
from ..configs import Config

OPTIONS = {"enable_fp_fusion": True}
# For kernels that sum products over lanes. If a lane fuses its own product into the sum, it rounds
# the other lane's product but not its own. Lanes then hold differently rounded sums, and it is
# unspecified which of them is stored.
SUMS_OVER_LANES = {"enable_fp_fusion": False}


def on_its_device(call):
    """Decorator: launches on the GPU of the first argument, a problem or a tensor, which need not
    be the current device."""

    @wraps(call)
    def on_device(first: Problem | Tensor, *rest):
        x = first.q if isinstance(first, Problem) else first
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            return call(first, *rest)

    return on_device


def start(kernel, grid: tuple[int, ...], config: Config, options: dict[str, bool] = OPTIONS):
    """Returns a function of the kernel's arguments that launches it on a grid."""
    return partial(
        kernel[grid],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.registers,
        **options,
    )
