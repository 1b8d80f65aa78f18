"""How kernels are launched: with which options, and on which device."""

from __future__ import annotations

from contextlib import nullcontext
from functools import wraps

import torch
from torch import Tensor

OPTIONS = {"enable_fp_fusion": True}


def where_the_tensors_are(call):
    """Launches on the GPU of the first argument, which need not be the current one."""

    @wraps(call)
    def on_device(x: Tensor, *rest):
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            return call(x, *rest)

    return on_device
