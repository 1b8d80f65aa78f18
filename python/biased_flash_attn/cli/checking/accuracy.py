"""Are the results of a problem as exact as naive attention's? One row for each dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ... import backends
from ..accuracy import SMALLEST, allowed
from . import calls, oracle
from .failures import KERNEL_ERRORS, described, is_out_of_memory
from .problems import DTYPES, Call, Problem, draw

# Errors are compared with the size of results nearby: early queries have large outputs, next to
# which a late tile could be wrong unseen.
NEARBY = 128


@dataclass(frozen=True)
class Error:
    """The worst error of a result: the one that is the largest share of what is allowed there."""

    result: str
    error: float  # relative to the size of the results nearby
    allowed: float
    place: str

    @property
    def share(self) -> float:
        return self.error / self.allowed


@dataclass(frozen=True)
class Row:
    """A form in one kind of call and dtype."""

    form: str
    call: str
    dtype: str
    errors: tuple[Error, ...] = ()
    repeats: bool = True  # whether a second run gave the same bits
    failure: str | None = None  # why there are no results
    refusal: str | None = None  # why the backend does not take the call

    @property
    def passed(self) -> bool:
        exact = all(error.share <= 1 for error in self.errors)
        return bool(self.errors) and exact and self.repeats

    @property
    def worst(self) -> Error:
        return max(self.errors, key=lambda error: error.share)


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
                torch.cuda.synchronize()  # an error of a kernel is raised here, at the latest
        except KERNEL_ERRORS as error:
            if is_out_of_memory(error):
                raise
            yield Row(*where, failure=described(error))
            if isinstance(error, torch.AcceleratorError):
                raise  # a GPU that reported an error runs nothing else for this process
            continue
        repeats = all(torch.equal(again[result], x) for result, x in found.items())
        yield Row(*where, tuple(errors(problem, found, exact, sizes)), repeats)


def errors(
    problem: Problem, found: dict[str, Tensor], exact: dict[str, Tensor], sizes: dict[str, Tensor]
) -> Iterator[Error]:
    """The worst error of each result, by the rule of `cli.accuracy`."""
    dtype = problem.leaves["q"].dtype
    naive, _ = oracle.results(problem)
    for name, value in exact.items():
        size = nearby(sizes[name]).clamp(min=SMALLEST)
        error, of_naive = (nearby(x[name].double() - value) / size for x in (found, naive))
        bound = allowed(of_naive, dtype)
        share = (error / bound).nan_to_num(torch.inf, torch.inf)
        worst = int(share.argmax())
        place = described_place(value, *divmod(worst, share.shape[1]))
        # NaN is not a number that JSON has.
        error = error.nan_to_num(torch.inf, torch.inf)
        yield Error(name, float(error.flatten()[worst]), float(bound.flatten()[worst]), place)


def nearby(x: Tensor) -> Tensor:
    """The largest absolute values of stretches of NEARBY rows, (heads, stretches)."""
    x = x.abs()
    x = x.amax(3) if x.dim() == 4 else x
    x = x.flatten(0, -2) if x.dim() > 1 else x[None]
    return pad(x, (0, -x.shape[1] % NEARBY)).unflatten(1, (-1, NEARBY)).amax(2)


def described_place(x: Tensor, head: int, stretch: int) -> str:
    """Where a stretch of rows is."""
    n = x.shape[min(2, x.dim() - 1)]
    rows = f"{stretch * NEARBY} to {min((stretch + 1) * NEARBY, n) - 1}"
    if x.dim() < 2:
        return f"entries {rows}"
    if x.dim() == 2:
        return f"head {head}, entries {rows}"
    return "batch {}, head {}, rows {}".format(*divmod(head, x.shape[1]), rows)
