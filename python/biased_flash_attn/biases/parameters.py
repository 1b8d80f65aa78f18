"""Checks and ranges of the parameters of biases."""

from __future__ import annotations

import dis
import inspect
import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from numbers import Real
from types import FunctionType

import torch
from torch import Tensor, nn


def positive(parameter: Tensor, most: float | None = None) -> Tensor:
    """The parameter in float64, clamped to [0.01, most], with straight-through gradients.

    The authors of KERPLE clamp the stored values, which also preserves gradients at the limit, so
    that a head at the limit can recover.
    """
    unclamped = parameter.double()
    return unclamped + (unclamped.clamp(0.01, most) - unclamped).detach()


def positive_int(name: str, value: int) -> int:
    """Returns value, or raises an error that names the argument."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if value <= 0:
        raise ValueError(f"{name} must be positive, not {value}")
    return value


def finite(name: str, value: float) -> float:
    """Returns value, or raises an error that names the argument."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, not {value}")
    return float(value)


def check_function(function: Callable) -> Callable:
    """Returns the function of a bias, or raises TypeError if it cannot be called.

    Warns if it captures trained parameters, which are then none of the bias. Those of `self` are of
    a module that creates a bias of its own parameters.
    """
    if not callable(function):
        raise TypeError(f"function must be callable, not {type(function).__name__}")
    if inspect.isfunction(function) and not torch.compiler.is_compiling():
        for name, value in _captured(function).items():
            if name != "self" and _is_trained(value):
                warnings.warn(
                    f"function reads {name}, a {type(value).__name__} that is not among the"
                    " parameters of the bias, where an optimizer would find it; pass a"
                    " torch.nn.Module as the function, or make a class of the bias, with a formula",
                    stacklevel=4,
                )
    return function


def _captured(function: FunctionType) -> dict[str, object]:
    """The variables of enclosing functions and of the module that a function reads itself."""
    code = function.__code__
    captured = {
        step.argval: function.__globals__[step.argval]
        for step in dis.get_instructions(code)
        if step.opname == "LOAD_GLOBAL" and step.argval in function.__globals__
    }
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the variable has no value yet
            captured[name] = cell.cell_contents
    return captured


def _is_trained(value: object) -> bool:
    if isinstance(value, nn.Module):
        return any(parameter.requires_grad for parameter in value.parameters())
    return isinstance(value, nn.Parameter) and value.requires_grad
