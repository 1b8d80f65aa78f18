"""Makes Triton's interpreter quick enough for tests, and strict about addresses."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from torch import Tensor
from triton.runtime import interpreter


def prepare_once(patch: pytest.MonkeyPatch, kernels: str) -> None:
    """The language is prepared where one of the package of kernels is launched, and once for a
    module of Triton's, not for every function that is called: that takes most of the time."""
    prepare_and_call, prepared = interpreter.InterpretedFunction.__call__, set()

    def call(self, *args, **kwargs):
        module = self.fn.__module__
        if module in prepared or module.startswith(kernels):
            return self.rewrite()(*args, **kwargs)
        prepared.add(module)
        return prepare_and_call(self, *args, **kwargs)

    patch.setattr(interpreter.InterpretedFunction, "__call__", call)


def check_memory(patch: pytest.MonkeyPatch) -> None:
    """Loads and stores raise IndexError where an address lies in no tensor of the launch."""
    memory = CheckedMemory(interpreter._interpreter)
    given = interpreter.GridExecutor._init_args_hst

    def hold_and_give(self, arguments, named):
        memory.hold(tensors_of((*arguments, *named.values())))
        return given(self, arguments, named)

    patch.setattr(interpreter, "_interpreter", memory)
    patch.setattr(interpreter.GridExecutor, "_init_args_hst", hold_and_give)


class CheckedMemory:
    """The interpreter's loads and stores, which have to lie within the tensors that are held."""

    def __init__(self, native):
        self.native = native
        self.begins = self.ends = np.empty(0, np.uint64)

    def __getattr__(self, name: str):
        return getattr(self.native, name)

    def hold(self, tensors: Iterator[Tensor]) -> None:
        spans = {(x.data_ptr(), x.nbytes()) for x in (x.untyped_storage() for x in tensors)}
        begins, sizes = np.array(sorted(spans), np.uint64).reshape(-1, 2).T
        self.begins, self.ends = begins, begins + sizes

    def load(self, addresses, mask, other, dtype):
        self.require(addresses[mask], np.dtype(dtype).itemsize)
        return self.native.load(addresses, mask, other, dtype)

    def store(self, addresses, values, mask):
        self.require(addresses[mask], values.itemsize)
        return self.native.store(addresses, values, mask)

    def require(self, addresses: np.ndarray, size: int) -> None:
        """All are addresses of one tensor."""
        if addresses.size == 0:
            return
        last = int(addresses.max()) + size
        at = np.searchsorted(self.begins, addresses.min(), side="right") - 1
        if at < 0 or last > self.ends[at]:
            raise IndexError("an address lies in no tensor of the kernel")


def tensors_of(arguments) -> Iterator[Tensor]:
    for one in arguments:
        if isinstance(one, tuple):
            yield from tensors_of(one)
        elif isinstance(one, Tensor):
            yield one
