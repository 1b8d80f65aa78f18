"""How kernels are launched: with which options, and on which device."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial, wraps

import torch
from torch import Tensor

from ...problem import Problem
from ..configs import Config

OPTIONS = {"enable_fp_fusion": True}
# For kernels that sum products over lanes: where a lane fuses its own product with the sum, the
# product of the other lane is rounded and its own is not. Lanes then hold different roundings of
# one sum, and which of them is stored is not specified.
SUMS_OVER_LANES = {"enable_fp_fusion": False}


def on_its_device(call):
    """Launches on the GPU of the first argument, a problem or a tensor, which need not be the
    current one."""

    @wraps(call)
    def on_device(first: Problem | Tensor, *rest):
        x = first.q if isinstance(first, Problem) else first
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            return call(first, *rest)

    return on_device


def start(kernel, grid: tuple[int, ...], config: Config, options: dict[str, bool] = OPTIONS):
    """The kernel with a grid of programs: a call of its arguments."""
    return partial(
        kernel[grid], num_warps=config.num_warps, num_stages=config.num_stages, **options
    )
