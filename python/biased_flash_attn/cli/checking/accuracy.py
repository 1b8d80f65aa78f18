"""Compares the results of a problem with float64 and naive attention. One row for each dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ... import backends
from ...exactness import Sums, compared
from . import calls, oracle
from .problems import DTYPES, Call, Problem, draw

try:
    from triton.errors import TritonError
except ImportError:  # Triton is not installed
    TritonError = RuntimeError

# Errors of PyTorch, of the compiler, and of launches that exceed the resources of the GPU.
KERNEL_ERRORS = (RuntimeError, TritonError)
LONGEST = 300  # message
# Errors are relative to the size of results in the same block of rows: early queries have large
# outputs, which would hide errors in late tiles.
BLOCK_ROWS = 128


@dataclass(frozen=True)
class Error:
    """The worst error of a result: the largest fraction of the error that is allowed there."""

    result: str
    error: float  # relative to the size of the results in the same block
    allowed: float
    place: str

    @property
    def fraction(self) -> float:
        return self.error / self.allowed


@dataclass(frozen=True)
class Row:
    """The result for a form in one kind of call and dtype."""

    form: str
    call: str
    dtype: str
    errors: tuple[Error, ...] = ()
    repeats: bool = True  # whether a second run gave the same bits
    failure: str | None = None  # why there are no results
    refusal: str | None = None  # why the backend does not support the call

    @property
    def passed(self) -> bool:
        exact = all(error.fraction <= 1 for error in self.errors)
        return bool(self.errors) and exact and self.repeats

    @property
    def worst(self) -> Error:
        return max(self.errors, key=lambda error: error.fraction)


def rows(
    form: str,
    call: Call,
    length: int,
    seed: int,
    device: str,
    backend: str,
    dtypes: tuple[str, ...] = tuple(DTYPES),
) -> Iterator[Row]:
    """A row for each dtype."""
    drawn: dict[int, tuple] = {}
    for name in dtypes:
        dtype = DTYPES[name]
        if dtype.itemsize not in drawn:
            double = draw(form, call, length, dtype, seed, device)
            drawn[dtype.itemsize] = double, oracle.results(double)
        double, exact = drawn[dtype.itemsize]
        problem = double.to(dtype)
        where = form, str(call), name
        try:
            found, again = (calls.results(problem, backend) for _ in range(2))
            if device != "cpu":
                torch.cuda.synchronize()  # raises errors of kernels
        except backends.RefusedError as error:
            yield Row(*where, refusal=str(error))
            continue
        except KERNEL_ERRORS as error:
            if is_out_of_memory(error):
                raise
            yield Row(*where, failure=described(error))
            if isinstance(error, torch.AcceleratorError):
                raise  # the GPU context is unusable after an error
            continue
        repeats = all(torch.equal(again[result], x) for result, x in found.items())
        yield Row(*where, tuple(errors(problem, found, exact)), repeats)


def errors(problem: Problem, found: dict[str, Tensor], exact: Sums) -> Iterator[Error]:
    """The worst error of each result."""
    dtype, naive = problem.leaves["q"].dtype, oracle.results(problem).values
    for name, value in exact.values.items():
        size = block_maxima(exact.magnitudes[name])
        results = found[name], value, naive[name]
        error, bound = compared(*results, size, dtype, maxima=block_maxima)
        fraction = (error / bound).nan_to_num(torch.inf, torch.inf)
        worst = torch.unravel_index(fraction.argmax(), fraction.shape)
        # JSON cannot represent NaN.
        error = error.nan_to_num(torch.inf, torch.inf)
        place = describe_place(value, *map(int, worst))
        yield Error(name, float(error[worst]), float(bound[worst]), place)


def block_maxima(x: Tensor) -> Tensor:
    """The largest absolute values of blocks of BLOCK_ROWS rows, (..., blocks)."""
    x = row_maxima(x)
    return pad(x, (0, -x.shape[-1] % BLOCK_ROWS)).unflatten(-1, (-1, BLOCK_ROWS)).amax(-1)


def row_maxima(x: Tensor) -> Tensor:
    """The largest absolute values of rows (B, H, N) of x (B, H, N, D); those of all entries of a
    tensor without channels."""
    x = x.abs()
    return torch.atleast_1d(x.amax(3) if x.dim() == 4 else x.squeeze(-1))


def describe_place(x: Tensor, *index: int) -> str:
    """The indices of a block of rows, from the index of block_maxima."""
    *others, block = index
    first, end = block * BLOCK_ROWS, row_maxima(x).shape[-1]
    return f"[{''.join(f'{i}, ' for i in others)}{first}:{min(first + BLOCK_ROWS, end)}]"


def is_out_of_memory(error: Exception) -> bool:
    """Whether the memory of the GPU or of the system was exhausted."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def described(error: Exception) -> str:
    """The kind of an error and the first line of its message."""
    first_line = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {first_line}"[:LONGEST]
