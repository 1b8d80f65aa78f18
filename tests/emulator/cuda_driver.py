"""The driver of the CUDA kernels on a Hopper GPU that is emulated on tensors in CPU memory."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from biased_flash_attn.shared_memory import block_bytes

from . import _core
from .execution import launch
from .parser import Kernel, parse
from .tensor_map import ELEMENTS

LARGEST_GRID = 2**31 - 1
MOST_THREADS = 1024
LARGEST_BOX = 256
SWIZZLE = 128  # bytes
SWIZZLES, ZERO_FILL = {128: 3}, 0
MAX_PARSED = 16
MULTIPROCESSORS = 3  # few, so that blocks of small problems have more than one part of the work


class InvalidValueError(ValueError):
    """The driver would report CUDA_ERROR_INVALID_VALUE, or behaviour would be undefined."""


class Function(NamedTuple):
    """A loaded kernel, and the dynamic shared memory that it is permitted."""

    kernel: Kernel
    shared_bytes: int


class EmulatedDriver:
    """Checks every argument as the CUDA driver documents it, and executes launches."""

    architecture = "compute_90a"

    def __init__(self, seed: int = 0, approximation_seed: int = 0):
        self.seed = seed
        self.approximation_seed = approximation_seed
        self.resident: int | None = None  # clusters that run side by side; drawn by default
        self.launches = 0
        self._parsed: OrderedDict[bytes, Kernel] = OrderedDict()

    def refusal(self, device: torch.device) -> str:
        return ""

    def multiprocessors(self, device: torch.device) -> int:
        return MULTIPROCESSORS

    def load(self, device: torch.device, kernel, shared_bytes: int) -> Function:
        parsed = self._parse(kernel.image)
        require(kernel.name == parsed.name, f"the module has no function {kernel.name}")
        total = shared_bytes + parsed.shared_bytes
        require(0 <= total <= block_bytes(90), f"{total} bytes of shared memory")
        return Function(parsed, shared_bytes)

    def tensor_map(
        self,
        dtype: torch.dtype,
        address: int,
        sizes: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
    ) -> bytes:
        rank, bytes_of_row = len(sizes), box[0] * dtype.itemsize
        require(1 <= rank <= 5, f"rank {rank}")
        require(len(strides) == rank - 1 and len(box) == rank, "strides or box of another rank")
        require(address % 16 == 0, f"address {address:#x} is not aligned to 16 bytes")
        require(all(1 <= n <= 2**32 for n in sizes), f"sizes {sizes}")
        # The documentation does not say whether a stride may be 0.
        require(all(0 < n < 2**40 and n % 16 == 0 for n in strides), f"strides {strides}")
        require(all(1 <= n <= LARGEST_BOX for n in box), f"box {box}")
        require(bytes_of_row % 16 == 0, f"rows of {bytes_of_row} bytes in a box")
        require(bytes_of_row <= SWIZZLE, f"rows of {bytes_of_row} bytes, swizzled by {SWIZZLE}")
        options = [1] * rank, SWIZZLES[SWIZZLE], ZERO_FILL
        return _core.tensor_map(address, ELEMENTS[dtype], sizes, strides, box, *options)

    def launch(
        self,
        device: torch.device,
        function: Function,
        grid: int,
        block: int,
        shared_bytes: int,
        parameters: bytes,
        tensors: Sequence[Tensor],
    ) -> None:
        kernel, permitted = function
        require(1 <= grid <= LARGEST_GRID, f"grid {grid}")
        require(1 <= block <= MOST_THREADS, f"block {block}")
        threads = math.prod(kernel.threads)
        require(block == threads, f"block {block}; the kernel is compiled for {threads} threads")
        require(shared_bytes <= permitted, f"{shared_bytes} bytes of {permitted} permitted ones")
        (parameter,) = kernel.parameters
        size = len(parameters)
        require(size == parameter.size, f"parameters of {size} bytes, not {parameter.size}")
        require(all(x.device == device for x in tensors), f"tensors that are not on {device}")
        launch(
            kernel,
            (grid,),
            [parameters],
            block=(block,),
            shared_bytes=shared_bytes,
            memory=tensors,
            seed=self.seed,
            approximation_seed=self.approximation_seed,
            resident=self.resident,
        )
        self.launches += 1

    def _parse(self, image: bytes) -> Kernel:
        """The kernel of a module; keeps the latest ones, as parsing takes seconds."""
        if image not in self._parsed:
            (self._parsed[image],) = parse(image.decode()).kernels.values()
            if len(self._parsed) > MAX_PARSED:
                self._parsed.popitem(last=False)
        self._parsed.move_to_end(image)
        return self._parsed[image]


def require(is_valid: bool, what: str) -> None:
    if not is_valid:
        raise InvalidValueError(what)
