"""Checks and ranges of the parameters of biases."""

from __future__ import annotations

import dis
import functools
import inspect
import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from numbers import Number, Real
from types import CodeType, FunctionType

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


def read_by(function: Callable) -> tuple:
    """The tensors, numbers and strings that a function reads: those of the module that it is or is
    a method of, or the variables that a plain function reads itself."""
    owner = getattr(function, "__self__", function)
    if isinstance(owner, nn.Module):
        return *owner.parameters(), *owner.buffers()
    captured = _captured(function).values() if inspect.isfunction(function) else ()
    modules = [x for x in captured if isinstance(x, nn.Module)]
    values = [x for x in captured if isinstance(x, (Tensor, Number, str))]
    return *values, *(x for module in modules for x in read_by(module))


@functools.cache
def _globals_of(code: CodeType) -> tuple[str, ...]:
    steps = dis.get_instructions(code)
    return tuple(step.argval for step in steps if step.opname == "LOAD_GLOBAL")


def _captured(function: FunctionType) -> dict[str, object]:
    """The variables of enclosing functions and of the module that a function reads itself."""
    code, of_module = function.__code__, function.__globals__
    captured = {name: of_module[name] for name in _globals_of(code) if name in of_module}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the variable has no value yet
            captured[name] = cell.cell_contents
    return captured


def _is_trained(value: object) -> bool:
    if isinstance(value, nn.Module):
        return any(parameter.requires_grad for parameter in value.parameters())
    return isinstance(value, nn.Parameter) and value.requires_grad
