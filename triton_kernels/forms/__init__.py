"""The forms of biases: for each, its device functions, its operands, and the gradients of its
tensors."""

from __future__ import annotations

from ... import problem as calls
from ..operands import FormFunctions
from . import beta, dense, distance, normalized, relative
from .base import Gathered as Gathered
from .base import Kernels

# The form whose configurations suit kernels that evaluate the bias pair by pair.
PAIRWISE = "log1p_square"
FORMS = {
    "none": Kernels((), FormFunctions(), lambda gathered: []),
    "linear": beta.LINEAR,
    "distance": distance.DISTANCE,
    "cumulative": beta.CUMULATIVE,
    "log1p_square": beta.LOG1P_SQUARE,
    "dense": dense.DENSE,
    "normalized": normalized.NORMALIZED,
    "relative": relative.kernels(last=False),
    "relative_last": relative.kernels(last=True),
}


def kernels_of(problem: calls.Problem) -> Kernels:
    """Returns the entry of FORMS for the problem's form."""
    name = problem.form.name
    if name not in FORMS:
        raise ValueError(
            f"the bias has the form {name!r}, for which backend 'triton' has no kernels; it has"
            f" those of {', '.join(FORMS)}. backend='reference' computes it with O(N^2) memory"
        )
    return FORMS[name]
