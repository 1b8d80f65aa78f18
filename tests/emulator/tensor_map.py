"""Tensor maps, which describe tensors in global memory for bulk copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import _core

# The numbers of tensormap.replace.
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
        tensor: its last dimension is contiguous (in PTX, the first one).
        box: the shape of one copy, in the order of the tensor's dimensions.
        element_strides: strides between the copied elements of the box, by default 1.
        swizzle: bytes of a row of the swizzle pattern in shared memory, or 0.
        fill: the value read outside the tensor, "zero" or "nan".
        element: the number of the element type, if it differs from that of the tensor.
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
