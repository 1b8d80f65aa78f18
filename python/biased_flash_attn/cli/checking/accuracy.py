"""Compares the results of a problem with float64 and naive attention. One row for each dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ... import backends
from ...error_bound import error_bound
from ..accuracy import SMALLEST, SUM_ROUNDINGS
from . import calls, oracle
from .failures import KERNEL_ERRORS, described, is_out_of_memory
from .problems import DTYPES, Call, Problem, draw

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
            drawn[dtype.itemsize] = double, *oracle.results(double)
        double, exact, sizes = drawn[dtype.itemsize]
        problem = double.to(dtype)
        where = form, str(call), name
        try:
            backends.choose(problem.leaves["q"], backend)
        except ValueError as error:
            yield Row(*where, refusal=str(error))
            continue
        try:
            found, again = (calls.results(problem, backend) for _ in range(2))
            if device != "cpu":
                torch.cuda.synchronize()  # raises errors of kernels
        except KERNEL_ERRORS as error:
            if is_out_of_memory(error):
                raise
            yield Row(*where, failure=described(error))
            if isinstance(error, torch.AcceleratorError):
                raise  # the GPU context is unusable after an error
            continue
        repeats = all(torch.equal(again[result], x) for result, x in found.items())
        yield Row(*where, tuple(errors(problem, found, exact, sizes)), repeats)


def errors(
    problem: Problem, found: dict[str, Tensor], exact: dict[str, Tensor], sizes: dict[str, Tensor]
) -> Iterator[Error]:
    """The worst error of each result, by the rule of `error_bound`."""
    dtype = problem.leaves["q"].dtype
    naive, _ = oracle.results(problem)
    for name, value in exact.items():
        size = block_maxima(sizes[name]).clamp(min=SMALLEST)
        error, of_naive = (block_maxima(x[name].double() - value) / size for x in (found, naive))
        bound = error_bound(of_naive, dtype, float32_roundings=SUM_ROUNDINGS)
        fraction = (error / bound).nan_to_num(torch.inf, torch.inf)
        worst = int(fraction.argmax())
        place = describe_place(value, *divmod(worst, fraction.shape[1]))
        # JSON cannot represent NaN.
        error = error.nan_to_num(torch.inf, torch.inf)
        yield Error(name, float(error.flatten()[worst]), float(bound.flatten()[worst]), place)


def block_maxima(x: Tensor) -> Tensor:
    """The largest absolute values of blocks of BLOCK_ROWS rows, (heads, blocks)."""
    x = x.abs()
    x = x.amax(3) if x.dim() == 4 else x
    x = x.flatten(0, -2) if x.dim() > 1 else x[None]
    return pad(x, (0, -x.shape[1] % BLOCK_ROWS)).unflatten(1, (-1, BLOCK_ROWS)).amax(2)


def describe_place(x: Tensor, head: int, block: int) -> str:
    """The location of a block of rows."""
    n = x.shape[min(2, x.dim() - 1)]
    rows = f"{block * BLOCK_ROWS} to {min((block + 1) * BLOCK_ROWS, n) - 1}"
    if x.dim() < 2:
        return f"entries {rows}"
    if x.dim() == 2:
        return f"head {head}, entries {rows}"
    return "batch {}, head {}, rows {}".format(*divmod(head, x.shape[1]), rows)
