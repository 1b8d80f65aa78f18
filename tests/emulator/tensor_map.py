"""Tensor maps, which tell bulk copies what a tensor in global memory looks like."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import _core

# As tensormap.replace numbers them.
ELEMENTS = {
    torch.uint8: 0,
    torch.int8: 0,
    torch.bool: 0,
    torch.float8_e4m3fn: 0,
    torch.float8_e5m2: 0,
    torch.int16: 1,
    torch.int32: 3,
    torch.int64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 9,
    torch.bfloat16: 10,
}
TF32 = 11
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_FILLS = {"zero": 0, "nan": 1}


class TensorMap:
    """Describes a tensor and a box of it, as an argument of a kernel.

    Args:
        tensor: its last dimension is contiguous, as in PTX the first one is.
        box: what one copy moves, in the order of the tensor's dimensions.
        element_strides: which elements of the box are copied, every one where it is left out.
        swizzle: bytes of a row of the pattern in shared memory, or 0.
        fill: what is read outside the tensor, "zero" or "nan".
        element: the number of the element type, where it is not the tensor's own.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        box: Sequence[int],
        *,
        element_strides: Sequence[int] | None = None,
        swizzle: int = 0,
        fill: str = "zero",
        element: int | None = None,
    ):
        if tensor.stride(-1) != 1:
            raise ValueError("the last dimension of the tensor is not contiguous")
        self.tensor = tensor
        self.encoded = _core.tensor_map(
            tensor.data_ptr(),
            ELEMENTS[tensor.dtype] if element is None else element,
            tensor.shape[::-1],
            [stride * tensor.element_size() for stride in tensor.stride()[-2::-1]],
            box[::-1],
            (element_strides or [1] * tensor.dim())[::-1],
            _SWIZZLES[swizzle],
            _FILLS[fill],
        )

    def __bytes__(self) -> bytes:
        return self.encoded
