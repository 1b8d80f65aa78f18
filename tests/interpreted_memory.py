"""Has Triton's interpreter refuse addresses that lie in none of the tensors a kernel is given."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from torch import Tensor
from triton.runtime import interpreter


class CheckedMemory:
    """The interpreter's loads and stores, each within one tensor of the launch."""

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
        """All are of one tensor."""
        if addresses.size == 0:
            return
        last = int(addresses.max()) + size
        at = np.searchsorted(self.begins, addresses.min(), side="right") - 1
        if at < 0 or last > self.ends[at]:
            raise IndexError("an address lies in none of the kernel's tensors")


def tensors_of(arguments) -> Iterator[Tensor]:
    for one in arguments:
        if isinstance(one, tuple):
            yield from tensors_of(one)
        elif isinstance(one, Tensor):
            yield one


def check_memory(patch: pytest.MonkeyPatch) -> None:
    memory = CheckedMemory(interpreter._interpreter)
    given = interpreter.GridExecutor._init_args_hst

    def hold_and_give(self, arguments, named):
        memory.hold(tensors_of((*arguments, *named.values())))
        return given(self, arguments, named)

    patch.setattr(interpreter, "_interpreter", memory)
    patch.setattr(interpreter.GridExecutor, "_init_args_hst", hold_and_give)
