"""The calls of the CUDA driver that launch a kernel."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from .nvrtc import Kernel

CAPABILITY = (9, 0)  # the only one whose GPUs have all instructions of the kernels
_ELEMENTS = {torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16"}


class Driver(Protocol):
    """Loads and launches kernels on a device, on PyTorch's current stream.

    Attributes:
        architecture: what kernels are compiled for.
    """

    architecture: str

    def refusal(self, device: torch.device) -> str:
        """Returns the reason why a device cannot run the kernels, or an empty string."""

    def multiprocessors(self, device: torch.device) -> int:
        """Returns how many blocks of a kernel that fills a multiprocessor run at a time."""

    def load(self, device: torch.device, kernel: Kernel, shared_bytes: int) -> Any:
        """Loads a kernel, permits it dynamic shared memory, and returns its function."""

    def tensor_map(
        self,
        dtype: torch.dtype,
        address: int,
        sizes: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
    ) -> bytes:
        """Returns the tensor map of 128 bytes for a tensor whose first dimension is contiguous.

        strides: bytes, of the other dimensions. box: sizes of a copy, whose rows are swizzled by
        128 bytes in shared memory and are 0 outside the tensor.
        """

    def launch(
        self,
        device: torch.device,
        function: Any,
        grid: int,
        block: int,
        shared_bytes: int,
        parameters: bytes,
        tensors: Sequence[Tensor],
    ) -> None:
        """Launches `grid` blocks of `block` threads of a function with one parameter, a structure.

        tensors: those whose addresses it holds. They may be freed when the call returns, as
        PyTorch reuses memory in the order of the stream.
        """


class CudaDriver:
    """The driver, through cuda-bindings."""

    architecture = "sm_90a"

    def refusal(self, device: torch.device) -> str:
        found = torch.cuda.get_device_capability(device)
        if found == CAPABILITY and torch.version.hip is None:
            return ""
        return f"needs a GPU of compute capability 9.0 (H100, H200); {device} has {found}"

    def multiprocessors(self, device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).multi_processor_count

    def load(self, device: torch.device, kernel: Kernel, shared_bytes: int) -> Any:
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with _current(device):
            module = _checked(driver.cuModuleLoadData(kernel.image))
            function = _checked(driver.cuModuleGetFunction(module, kernel.name.encode()))
            _checked(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
        return function

    def tensor_map(
        self,
        dtype: torch.dtype,
        address: int,
        sizes: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
    ) -> bytes:
        from cuda.bindings import driver

        rank = len(sizes)
        encoded = (ctypes.c_byte * 192)()
        aligned = -ctypes.addressof(encoded) % 64
        status = _encode()(
            *(ctypes.addressof(encoded) + aligned, _element(dtype), rank, address),
            (ctypes.c_uint64 * rank)(*sizes),
            (ctypes.c_uint64 * (rank - 1))(*strides),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        _checked((driver.CUresult(status),))
        return bytes(encoded)[aligned : aligned + 128]

    def launch(
        self,
        device: torch.device,
        function: Any,
        grid: int,
        block: int,
        shared_bytes: int,
        parameters: bytes,
        tensors: Sequence[Tensor],
    ) -> None:
        from cuda.bindings import driver

        buffer = ctypes.create_string_buffer(parameters, len(parameters))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        stream = torch.cuda.current_stream(device).cuda_stream
        with _current(device):
            launched = driver.cuLaunchKernel(
                function,
                grid,
                1,
                1,
                block,
                1,
                1,
                shared_bytes,
                stream,
                ctypes.addressof(pointers),
                0,
            )
        _checked(launched)


@contextlib.contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Context manager: the context that PyTorch uses on a device is current.

    A thread in which PyTorch has not used the device has no current context.
    """
    from cuda.bindings import driver

    with torch.cuda.device(device):
        _checked(driver.cuCtxSetCurrent(_context(torch.cuda.current_device())))
        yield


@cache
def _context(index: int) -> Any:
    """Returns the primary context of a device."""
    from cuda.bindings import driver

    _checked(driver.cuInit(0))
    return _checked(driver.cuDevicePrimaryCtxRetain(_checked(driver.cuDeviceGet(index))))


def _element(dtype: torch.dtype) -> int:
    from cuda.bindings import driver

    return getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_ELEMENTS[dtype]}")


@cache
def _encode() -> Any:
    """Returns cuTensorMapEncodeTiled.

    The function of this name in cuda-bindings returns an object in memory that is not aligned to
    the 64 bytes that a tensor map needs, so that some releases crash.
    """
    from cuda.bindings import driver

    address, _ = _checked(driver.cuGetProcAddress(b"cuTensorMapEncodeTiled", 12000, 0))
    u32, pointer = ctypes.c_uint32, ctypes.c_void_p
    options = [ctypes.c_int] * 4
    kinds = pointer, ctypes.c_int, u32, pointer, *[pointer] * 4, *options
    return ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(address)


def _checked(result: tuple) -> Any:
    """Returns the values that a call of cuda-bindings returned besides its status."""
    status, *values = result
    if status:
        raise RuntimeError(f"the CUDA driver reported {status.name}")
    return values[0] if len(values) == 1 else values
