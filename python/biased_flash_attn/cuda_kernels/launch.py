"""Launches kernels by a driver."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure
from typing import Any

import torch
from torch import Tensor

from .compiler import compiled
from .driver import Driver
from .parameters import TensorMap, encoded
from .variants import AnyVariant

ROW_OF_BOX = 64  # channels, the 128 bytes of a row of swizzled shared memory


class Launcher:
    """Launches kernels by a driver, and keeps the functions that it has loaded on each device."""

    def __init__(self, driver: Driver):
        self.driver = driver
        self._functions: dict[tuple[torch.device, AnyVariant], Any] = {}

    def launch(
        self, variant: AnyVariant, grid: int, parameters: Structure, tensors: Sequence[Tensor]
    ) -> None:
        """Launches `grid` blocks. tensors: all whose addresses are in the parameters."""
        driver, device = self.driver, tensors[0].device
        function = self._functions.get((device, variant))
        if function is None:
            kernel = compiled(variant, driver.architecture)
            function = driver.load(device, kernel, variant.shared_bytes)
            self._functions[device, variant] = function
        sizes = grid, variant.threads, variant.shared_bytes
        driver.launch(device, function, *sizes, encoded(parameters), tensors)

    def tensor_map(self, x: Tensor, rows: int) -> TensorMap:
        """Returns the map of x (B, H, N, D), which is `addressable`, with boxes of some rows."""
        entries, heads, n, channels = x.shape
        # A dimension of size 1 needs a valid stride too.
        strides = [2 * (x.stride(dim) if x.shape[dim] > 1 else channels) for dim in (2, 1, 0)]
        sizes, box = (channels, n, heads, entries), (ROW_OF_BOX, rows, 1, 1)
        encoded_map = self.driver.tensor_map(x.dtype, x.data_ptr(), sizes, strides, box)
        return TensorMap.from_buffer_copy(encoded_map)


def addressable(x: Tensor) -> Tensor:
    """Returns x, or a copy of it if its address or strides do not suit a tensor map."""
    strides = [2 * x.stride(n) for n in range(3) if x.shape[n] > 1]
    suitable = all(0 < stride < 2**40 and stride % 16 == 0 for stride in strides)
    if suitable and x.stride(3) == 1 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
