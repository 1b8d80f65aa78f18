"""Maps each form to the class in csrc/cuda/forms that computes it and to that class's operands, and
the results of the backward kernels to gradients of the form's tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..forms import Form
from ..forms.cumulative import in_float32
from ..forms.gradients import sum_of_rows, sums_gradient
from ..problem import Problem, need_gradients
from .launch import addressable
from .variants import RANKS, WIDEST_WITH_VECTORS

Operands = tuple[str, dict[str, Tensor | int]]


class Results(NamedTuple):
    """Gradients, fields of `parameters.BackwardParams`; None if the form or the pass has none."""

    grad_gain: Tensor | None
    grad_query_sums: Tensor | None
    grad_key_sums: Tensor | None
    grad_table: Tensor | None
    grad_query_vectors: Tensor | None


@dataclass(frozen=True)
class Kernels:
    """How the kernels compute a form.

    operands: maps its tensors to the name of the class, and to fields of `parameters.Bias`.
    gradients: maps a problem and the results of the backward kernels to the gradients of its
        tensors, before the reduction of broadcast dimensions.
    multiplies: whether its tensors are factors of matrix products, in q's dtype.
    refusal: returns the reason why the kernels do not compute a problem, or an empty string.
    """

    operands: Callable[..., Operands]
    gradients: Callable[[Problem, Results], list[Tensor]]
    multiplies: bool = False
    refusal: Callable[[Problem], str] = lambda problem: ""


def operands(form: Form, dtype: torch.dtype) -> Operands:
    """dtype: that of q."""
    kernels = _FORMS[form.name]
    rounded = [x.to(dtype) for x in form.tensors] if kernels.multiplies else form.tensors
    return kernels.operands(*rounded)


def gradients(problem: Problem, results: Results) -> list[Tensor]:
    return _FORMS[problem.form.name].gradients(problem, results)


def refusal(problem: Problem) -> str:
    """Returns the reason why there are no kernels for a problem's form, or an empty string."""
    name = problem.form.name
    if name not in _FORMS:
        return f"has no kernels for the form {name!r} of the bias"
    return _FORMS[name].refusal(problem)


def _cumulative(name: str, sums: Tensor, gain: Tensor | None = None) -> Operands:
    high, low = in_float32(sums)
    sums = {"high": high, "low": low}
    return (name, sums) if gain is None else (f"{name}WithGain", sums | {"gain": gain})


def _vectors(vectors: Tensor, table: Tensor, _: Tensor, __: Tensor, *, extends: bool) -> Operands:
    missing = _padded_rank(vectors) - vectors.shape[3]
    if missing:
        vectors, table = pad(vectors, (0, missing)), pad(table, (0, 0, 0, missing))
    distance_vectors = addressable(table.mT.contiguous())
    operands = {"query_vectors": addressable(vectors), "distance_vectors": distance_vectors}
    operands |= {"columns": table.shape[3], "extends": extends}
    return f"Relative<{vectors.shape[3]}>", operands


def _padded_rank(vectors: Tensor) -> int:
    return next(x for x in RANKS if x >= vectors.shape[3])


def _refusal_of_vectors(problem: Problem) -> str:
    form, inputs = problem.form, (problem.q, problem.k, problem.v)
    rank, channels = form.query_factors.shape[3], max(x.shape[3] for x in inputs)
    if form.key_factors.shape[3]:
        return f"has no kernels for vectors of keys, which the form {form.name!r} of the bias has"
    if rank > RANKS[-1]:
        return f"has no kernels for vectors of more than {RANKS[-1]} channels; the bias has {rank}"
    if need_gradients([form.query_tables]):
        return f"has no gradients of the vectors of distances of the form {form.name!r} of the bias"
    if channels > WIDEST_WITH_VECTORS and need_gradients([*inputs, *form.tensors]):
        return (
            f"has no gradients with the form {form.name!r} of the bias for heads of more than"
            f" {WIDEST_WITH_VECTORS} channels; q or v has {channels}"
        )
    return ""


def _slopes_gradients(problem: Problem, results: Results) -> list[Tensor]:
    (slopes,) = problem.form.tensors
    are_keys = results.grad_gain is None
    rows = results.grad_key_sums if are_keys else results.grad_gain
    return [-sum_of_rows(rows, slopes.shape[0], problem.sequences, are_keys)]


def _table_gradients(problem: Problem, results: Results) -> list[Tensor]:
    return [results.grad_table.sum(2)]


def _sums_gradients(problem: Problem, results: Results) -> list[Tensor]:
    sums = sums_gradient(results.grad_query_sums, results.grad_key_sums, problem.sequences)
    return [sums, results.grad_gain][: len(problem.form.tensors)]


def _vectors_gradients(problem: Problem, results: Results) -> list[Tensor]:
    vectors, *others = problem.form.tensors
    grad_vectors = results.grad_query_vectors[..., : vectors.shape[3]]
    return [grad_vectors, *map(torch.zeros_like, others)]  # nothing requires the others


def _relative(*, extends: bool) -> Kernels:
    operands = partial(_vectors, extends=extends)
    return Kernels(operands, _vectors_gradients, multiplies=True, refusal=_refusal_of_vectors)


_FORMS = {
    "none": Kernels(lambda: ("None", {}), lambda problem, results: []),
    "linear": Kernels(lambda slopes: ("Linear", {"slopes": slopes}), _slopes_gradients),
    "distance": Kernels(lambda table: ("Distance", {"table": table}), _table_gradients),
    "cumulative": Kernels(partial(_cumulative, "Cumulative"), _sums_gradients),
    "log1p_square": Kernels(partial(_cumulative, "LogSquare"), _sums_gradients),
    "relative": _relative(extends=False),
    "relative_last": _relative(extends=True),
}
