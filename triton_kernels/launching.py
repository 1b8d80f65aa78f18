"""How kernels are launched: with which options, and on which device."""

from __future__ import annotations

from contextlib import nullcontext
from functools import wraps

import torch
from torch import Tensor

OPTIONS = {"enable_fp_fusion": True}
# For kernels that sum products over lanes: where a lane fuses its own product with the sum, the
# product of the other lane is rounded and its own is not. Lanes then hold different roundings of
# one sum, and which of them is stored is not specified.
SUMS_OVER_LANES = {"enable_fp_fusion": False}


def where_the_tensors_are(call):
    """Launches on the GPU of the first argument, which need not be the current one."""

    @wraps(call)
    def on_device(x: Tensor, *rest):
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            return call(x, *rest)

    return on_device
