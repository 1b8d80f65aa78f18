"""The C++ kernels as a backend: allocates results and passes addresses and strides to `_C`."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

import torch
from torch import Tensor

from .. import shared_constants
from ..forms.gradients import OWN
from ..problem import Problem
from .protocol import Report

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

_ELEMENTS = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
_UNBOUNDED = 2**40  # a window longer than any sequence


class Cpu:
    """C++ kernels for processors, for every dtype."""

    name = "cpu"
    device_type = "cpu"
    has_kernels = True

    def report(self) -> Report:
        if _MISSING:
            return Report(self.name, False, _MISSING)
        supported = ", ".join(_C.instruction_sets())
        detail = (
            f"{_C.instruction_set()} kernels on {torch.get_num_threads()} threads"
            f" ({platform.machine()}; built in and supported: {supported})"
        )
        return Report(self.name, True, detail)

    def refusal(self, q: Tensor, problem: Problem | None) -> str:
        if q.device.type != "cpu":
            return f"needs tensors on the CPU; q is on {q.device}"
        return f"is not available: {_MISSING}" if _MISSING else ""

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor]:
        o, lse = problem.empty_results()
        tensors = [_contiguous(x) for x in problem.form.tensors]
        fields = _fields(problem, tensors)
        fields["o"], fields["lse"] = _address(o), _address(lse)
        _C.forward(fields)
        return o, lse

    def backward(
        self,
        problem: Problem,
        o: Tensor,
        lse: Tensor,
        grad_o: Tensor,
        grad_lse: Tensor,
        *,
        targets: list[int],
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
        # grad_o may be an expanded tensor, such as the gradient of a sum; the kernels need
        # contiguous rows.
        grad_o = grad_o if grad_o.stride(3) == 1 else grad_o.contiguous()
        grad_lse = grad_lse.contiguous()
        form = problem.form
        grad_q, grad_k, grad_v = problem.empty_gradients()
        tensors = [_contiguous(x) for x in form.tensors]
        sums = _accumulators(problem, targets, grad_q, grad_k)
        fields = _fields(problem, tensors)
        fields |= {
            "o": _address(o),
            "lse": _address(lse),
            "grad_o": _address(grad_o),
            "grad_lse": _address(grad_lse),
            "grad_q": _address(grad_q),
            "grad_k": _address(grad_k),
            "grad_v": _address(grad_v),
            "grad_form": [_rows(x) for x in sums],
        }
        _C.backward(fields)
        of_form = [
            x.sum_to_size(y.shape).to(y.dtype) if target == OWN else None
            for x, y, target in zip(sums, form.tensors, targets, strict=bool(targets))
        ]
        return grad_q, grad_k, grad_v, of_form

    def trim(
        self, problem: Problem, near: Tensor, fraction: float, reach: int, from_end: bool
    ) -> Tensor:
        near, cut = near.contiguous(), problem.plan[int(from_end)].clone()
        tensors = [_contiguous(x) for x in problem.form.tensors]
        fields = _fields(problem, tensors)
        fields |= {
            "near": _address(near),
            "cut": _address(cut),
            "fraction": fraction,
            "reach": reach,
            "from_end": from_end,
        }
        _C.trim(fields)
        return cut

    def decode(self, problem: Problem) -> tuple[Tensor, Tensor]:
        pages = problem.pages
        o, lse = problem.empty_results()
        tensors = [_contiguous(x) for x in problem.form.tensors]
        window = problem.geometry.window
        fields = _operands(problem, tensors)
        fields |= {
            "window": _UNBOUNDED if window is None else window,
            "tolerance": problem.tolerance,
            "page_size": problem.k.shape[2],
            "columns": pages.block_table.shape[1],
            "lengths": pages.lengths.data_ptr(),
            "block_table": pages.block_table.data_ptr(),
            "o": _address(o),
            "lse": _address(lse),
        }
        fields |= {name: _address(x) for name, x in pages.bounds._asdict().items()}
        _C.decode(fields)
        return o, lse

    def append(self, pages: Tensor, rows: Tensor, block_table: Tensor, lengths: Tensor) -> None:
        batch, heads, tokens = rows.shape[:3]
        _C.append(
            {
                "item_bytes": rows.element_size(),
                "batch": batch,
                "heads": heads,
                "tokens": tokens,
                "channels": rows.shape[3] if rows.dim() == 4 else 1,
                "page_size": pages.shape[2],
                "columns": block_table.shape[1],
                "lengths": lengths.data_ptr(),
                "block_table": block_table.data_ptr(),
                "rows": _address(rows),
                "pages": _address(pages),
            }
        )


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


def _fields(problem: Problem, form_tensors: list[Tensor]) -> dict:
    """Returns the arguments that all kernels except decoding have."""
    geometry, sequences = problem.geometry, problem.sequences
    first_key, end_key = (None, None) if problem.plan is None else problem.plan
    reach = geometry.n_key + geometry.shift
    fields = _operands(problem, form_tensors)
    fields |= {
        "n_key": geometry.n_key,
        "shift": geometry.shift,
        "causal": geometry.causal,
        "window": reach if geometry.window is None else min(geometry.window, reach),
        "sequences": 0 if sequences is None else sequences.rows.data_ptr(),
        "first_key": _address(first_key),
        "end_key": _address(end_key),
    }
    return fields


def _operands(problem: Problem, form_tensors: list[Tensor]) -> dict:
    """Returns the arguments that all kernels have, decoding included.

    Addresses do not keep tensors alive; the caller must.
    """
    q, v = problem.q, problem.v
    batch, heads, n_query, head_dim = q.shape
    _, kv_heads, _, value_dim = v.shape
    if problem.sequences is not None:
        batch, n_query = problem.batch, problem.geometry.n_query
    return {
        "element": _ELEMENTS[q.dtype],
        "form": problem.form.name,
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "n_query": n_query,
        "head_dim": head_dim,
        "value_dim": value_dim,
        "scale": problem.scale,
        "threads": torch.get_num_threads(),
        "q": _address(q),
        "k": _address(problem.k),
        "v": _address(v),
        "form_tensors": [_rows(x) for x in form_tensors],
    }


def _address(x: Tensor | None) -> tuple[int, int, int, int] | None:
    """Returns the address and the batch, head and sequence strides; dimensions of size 1
    broadcast."""
    if x is None:
        return None
    shape, strides = x.shape, x.stride()
    return (
        x.data_ptr(),
        0 if shape[0] == 1 else strides[0],
        0 if shape[1] == 1 else strides[1],
        strides[2] if len(strides) > 2 else 1,
    )


def _rows(x: Tensor) -> tuple:
    """Returns the `_address` of a form's tensor, followed by its rows per head, the stride of its
    channels or 0, its element type and the number of channels."""
    rows = x.shape[2] if x.dim() > 2 else 1
    stride, channels = (x.stride(3), x.shape[3]) if x.dim() > 3 else (0, 1)
    return *_address(x), rows, stride, _ELEMENTS[x.dtype], channels


def _contiguous(x: Tensor) -> Tensor:
    """Returns x with contiguous rows, if it is (batch, heads, sequence)."""
    return x if x.dim() != 3 or x.stride(2) == 1 else x.contiguous()


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
