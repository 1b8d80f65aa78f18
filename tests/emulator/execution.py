"""Launches of kernels on tensors in CPU memory."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch

from . import _core
from .parser import Kernel, Parameter
from .tensor_map import TensorMap

_FORMATS = {"f32": "<f", "f64": "<d"}


class Fault(Exception):
    """An invalid operation of a kernel, and its location."""

    def __init__(self, kernel: Kernel, violation: _core.Violation):
        kind, message, index, block, warp, lane, address = violation.args
        instruction = kernel.instructions[index] if index >= 0 else None
        self.kind, self.kernel, self.block = kind, kernel.name, block
        self.warp, self.lane, self.address = warp, lane, address
        self.line = instruction.line if instruction else None
        self.text = instruction.text if instruction else ""
        self.source = instruction.source if instruction else ""
        message = re.sub(r"instruction (\d+)", partial(_described, kernel), message)
        where = [f"line {self.line} {self.source}".strip(), f"block {block}", f"warp {warp}"]
        where += [f"lane {lane}"] * (lane >= 0) + [f"address {address:#x}"] * (address > 0)
        super().__init__(
            f"{kind}: {message}\n  in {self.kernel}, {', '.join(where)}:\n  {self.text[:200]}"
        )


def _described(kernel: Kernel, found: re.Match) -> str:
    instruction = kernel.instructions[int(found[1])]
    return f"line {instruction.line} {instruction.source}".strip()


@dataclass(frozen=True)
class Counts:
    """What a launch executed, by instruction: see the fields of `Count` in the core."""

    kernel: Kernel
    rows: np.ndarray  # [instructions, 4]: warps, lanes, passes over shared memory, global sectors

    @cached_property
    def by_opcode(self) -> dict[str, int]:
        """How many warps executed each opcode."""
        total: dict[str, int] = {}
        for instruction, row in zip(self.kernel.instructions, self.rows, strict=True):
            total[instruction.opcode] = total.get(instruction.opcode, 0) + int(row[0])
        return {opcode: n for opcode, n in total.items() if n}

    @property
    def instructions(self) -> int:
        return int(self.rows[:, 0].sum())

    @property
    def shared_waves(self) -> int:
        return int(self.rows[:, 2].sum())

    @property
    def sectors(self) -> int:
        return int(self.rows[:, 3].sum())


def launch(
    kernel: Kernel,
    grid: Sequence[int],
    arguments: Sequence,
    *,
    block: Sequence[int] | None = None,
    shared_bytes: int = 0,
    cluster: Sequence[int] | None = None,
    memory: Sequence[torch.Tensor | np.ndarray | TensorMap] = (),
    seed: int = 0,
    approximation_seed: int = 0,
    resident: int | None = None,
) -> Counts:
    """Runs the kernel over the grid.

    Args:
        arguments: tensors and arrays for pointers, which make their memory accessible; integers and
            floats for scalars; tensor maps, which make their tensors accessible; bytes for other
            structures.
        block: threads of a block; by default, the number that the kernel requires.
        shared_bytes: dynamic shared memory.
        memory: what the kernel may access besides its arguments: tensors, arrays, and the tensors
            of tensor maps.
        seed: determines the interleaving of warps and the completion of asynchronous operations.
        approximation_seed: determines the errors of approximate instructions.
        resident: the number of clusters that run side by side; drawn from `seed` by default.

    Raises:
        Fault: if the kernel executes an invalid operation.
    """
    block = block or kernel.threads
    if block is None:
        raise ValueError(f"block is None; {kernel.name} does not declare a number of threads")
    if len(arguments) != len(kernel.parameters):
        raise ValueError(
            f"{kernel.name} takes {len(kernel.parameters)} arguments, not {len(arguments)}"
        )
    if resident is not None and resident < 1:
        raise ValueError(f"resident is {resident}; at least one cluster has to run")
    kinds = torch.Tensor, np.ndarray, TensorMap
    tensors = [x for x in (*arguments, *memory) if isinstance(x, kinds)]
    accessible = [span(x) for x in tensors]
    variables = kernel.module.variables.values()
    accessible += [(x.ctypes.data, x.nbytes, is_writable) for x, is_writable in variables]
    end = max((p.offset + p.size for p in kernel.parameters), default=0)
    encoded = bytearray(end)
    for parameter, argument in zip(kernel.parameters, arguments, strict=True):
        encoded[parameter.offset : parameter.offset + parameter.size] = encode(parameter, argument)
    try:
        rows = _core.run(
            kernel.program,
            _three(grid),
            _three(block),
            _three(cluster or kernel.cluster or (1,)),
            accessible,
            bytes(encoded),
            kernel.shared_bytes + shared_bytes,
            seed,
            approximation_seed,
            resident,
        )
    except _core.Violation as violation:
        raise Fault(kernel, violation) from None
    return Counts(kernel, np.array(rows, np.int64).reshape(-1, 4))


def span(x: torch.Tensor | np.ndarray | TensorMap) -> tuple[int, int, bool]:
    """The address of a tensor's memory, its size in bytes, and whether it is writable."""
    if isinstance(x, TensorMap):
        x = x.tensor
    if isinstance(x, torch.Tensor):
        storage = x.untyped_storage()
        return storage.data_ptr(), storage.nbytes(), True
    return x.ctypes.data, x.nbytes, x.flags.writeable


def encode(parameter: Parameter, argument) -> bytes:
    if isinstance(argument, TensorMap):
        argument = bytes(argument)
    if isinstance(argument, bytes):
        if len(argument) != parameter.size:
            raise ValueError(f"a parameter of {parameter.size} bytes cannot hold {len(argument)}")
        return argument
    if isinstance(argument, torch.Tensor):
        argument = argument.data_ptr()
    elif isinstance(argument, np.ndarray):
        argument = argument.ctypes.data
    if parameter.type in _FORMATS:
        return struct.pack(_FORMATS[parameter.type], argument)
    return (int(argument) % 2 ** (8 * parameter.size)).to_bytes(parameter.size, "little")


def _three(dims: Sequence[int]) -> list[int]:
    return [*dims, 1, 1][:3]
