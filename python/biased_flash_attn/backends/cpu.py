"""The C++ kernels as a backend: allocates results and passes addresses and strides to `_C`."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from .. import shared_constants
from ..arguments import by_name
from ..forms.gradients import OWN
from ..problem import Problem
from .protocol import ATTENTION, CONTEXT_PARALLELISM, DECODING, Report

try:
    from .. import _C
except ImportError as error:
    _record = Path(__file__).parents[1] / "_build_error.txt"
    _MISSING = (
        f"the C++ kernels were not built: "
        f"{_record.read_text().strip() if _record.exists() else error}\n"
        "install GCC 11 or Clang 14, or newer, with OpenMP and reinstall the package"
    )
else:
    _MISSING = ""
    if _C.constants() != shared_constants.numbers():
        raise ImportError(
            f"the C++ kernels were built with other constants, {_C.constants()}, than those of the"
            f" package, {shared_constants.numbers()}; rebuild them"
        )

_DTYPES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int64: "int64",
    torch.int32: "int32",
}


class Cpu:
    """C++ kernels for processors, for every dtype."""

    name = "cpu"
    device_type = "cpu"
    has_kernels = True
    calls = frozenset({ATTENTION, DECODING, CONTEXT_PARALLELISM})

    def report(self) -> Report:
        if _MISSING:
            return Report(self.name, False, _MISSING)
        supported = ", ".join(_C.instruction_sets())
        detail = (
            f"{_C.instruction_set()} kernels on {torch.get_num_threads()} threads"
            f" ({platform.machine()}; built in and supported: {supported})"
        )
        return Report(self.name, True, detail)

    def refusal(self, problem: Problem) -> str:
        if problem.q.device.type != "cpu":
            return f"needs tensors on the CPU; q is on {problem.q.device}"
        return f"is not available: {_MISSING}" if _MISSING else ""

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        results = problem.empty_forward_results()
        o, lse, pivot, log_sum = map(_described, results)
        _call(_C.forward, problem, o=o, lse=lse, pivot=pivot, log_sum=log_sum)
        return results

    def backward(
        self,
        problem: Problem,
        o: Tensor,
        pivot: Tensor,
        log_sum: Tensor,
        grad_o: Tensor,
        grad_lse: Tensor,
        *,
        targets: list[int],
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
        # grad_o may be an expanded tensor, such as the gradient of a sum; the kernels need
        # contiguous rows.
        grad_o = grad_o if grad_o.stride(3) == 1 else grad_o.contiguous()
        grad_lse = grad_lse.contiguous()
        grad_q, grad_k, grad_v = problem.empty_gradients()
        sums = _accumulators(problem, targets, grad_q, grad_k)
        _call(
            _C.backward,
            problem,
            o=_described(o),
            pivot=_described(pivot),
            log_sum=_described(log_sum),
            grad_o=_described(grad_o),
            grad_lse=_described(grad_lse),
            grad_q=_described(grad_q),
            grad_k=_described(grad_k),
            grad_v=_described(grad_v),
            grad_form=sums,
        )
        grad_form = [
            x.sum_to_size(y.shape).to(y.dtype) if target == OWN else None
            for x, y, target in zip(sums, problem.form.tensors, targets, strict=bool(targets))
        ]
        return grad_q, grad_k, grad_v, grad_form

    def trim(
        self, problem: Problem, near: Tensor, fraction: float, reach: int, from_end: bool
    ) -> Tensor:
        cut, near = problem.plan[int(from_end)].clone(), near.contiguous()
        _call(
            _C.trim,
            problem,
            near=_described(near),
            cut=_described(cut),
            fraction=fraction,
            reach=reach,
            from_end=from_end,
        )
        return cut

    def decode(self, problem: Problem) -> tuple[Tensor, Tensor]:
        o, lse = problem.empty_results()
        _call(_C.decode, problem, o=_described(o), lse=_described(lse))
        return o, lse

    def append(self, pages: Tensor, rows: Tensor, block_table: Tensor, lengths: Tensor) -> None:
        given = {"pages": pages, "rows": rows, "block_table": block_table, "lengths": lengths}
        _C.append({name: _described(x) for name, x in given.items()})


def _accumulators(
    problem: Problem, targets: list[int], grad_q: Tensor, grad_k: Tensor
) -> list[Tensor]:
    """Returns the tensors to which the kernel adds the gradients of the form's tensors. It adds the
    gradients of rows of q and k after it has written them."""
    if not targets:
        return []
    own = [
        x if target == OWN else x[:, :, :0]
        for x, target in zip(problem.form.tensors, targets, strict=True)
    ]
    made = problem.form.with_tensors(own).accumulators(
        problem.q.shape[0], problem.batch, problem.q.shape[1]
    )
    return [(x, grad_q, grad_k)[target] for x, target in zip(made, targets, strict=True)]


def _call(kernel: Callable[[dict], None], problem: Problem, **others) -> None:
    """Calls a kernel with the arguments of the problem and the others, by name."""
    form = problem.form
    if not all(map(_has_contiguous_rows, form.tensors)):
        tensors = [x if _has_contiguous_rows(x) else x.contiguous() for x in form.tensors]
        problem = replace(problem, form=form.with_tensors(tensors))
    arguments = by_name(problem, _described)
    arguments["threads"] = torch.get_num_threads()
    for name, x in others.items():
        arguments[name] = [*map(_described, x)] if isinstance(x, list) else x
    kernel(arguments)


def _described(x: Tensor | None) -> tuple | None:
    """What C++ reads of a tensor: its address, dtype, shape and strides. An address does not keep
    its tensor alive."""
    return None if x is None else (x.data_ptr(), _DTYPES[x.dtype], x.shape, x.stride())


def _has_contiguous_rows(x: Tensor) -> bool:
    """Whether rows are contiguous, if it is (batch, heads, sequence)."""
    return x.dim() != 3 or x.stride(2) == 1


def release_memory() -> None:
    """Returns the memory that the kernels keep between calls to the system."""
    if not _MISSING:
        _C.release_memory()


@contextlib.contextmanager
def instruction_set(name: str):
    """Context manager: the kernels use the named instruction set, for tests and benchmarks.

    Raises:
        ValueError: if this processor does not support it; lists the sets that it does.
    """
    before = _C.instruction_set()
    _C.use_instruction_set(name)
    try:
        yield
    finally:
        _C.use_instruction_set(before)
