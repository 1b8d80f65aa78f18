"""How a layer creates a bias from its class, and applies it to its inputs."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import NamedTuple

from torch import Tensor

from ..biases.base import Bias


class Call(NamedTuple):
    """The arguments of the attention that a bias determines.

    q: the queries of the attention. bias: a bias, or None. scale: the factor of q k^T, or None for
    1 / sqrt(D).
    """

    q: Tensor
    bias: object = None
    scale: float | None = None


def applied(
    bias: Bias | None, x: Tensor, q: Tensor, k: Tensor, positions: Tensor | None = None
) -> Call:
    """A bias, applied to the inputs of a layer: see `Bias`. positions are those of the queries."""
    if bias is None:
        return Call(q)
    options = {"positions": positions} if "positions" in bias.inputs else {}
    return Call(bias.queries(q, **options), bias(x, q, k, **options), bias.scale)


def make(kind: type[Bias], num_heads: int, dim: int, **options) -> Bias:
    """A bias of a layer, which determines the sizes that the class has no defaults for."""
    sizes = {"num_heads": num_heads, "dim": dim, "head_dim": dim // num_heads}
    return kind(**{name: sizes[name] for name in _sizes(kind)}, **options)


def options_of(kind: type[Bias]) -> tuple[str, ...]:
    """The arguments of the class that no layer determines."""
    return tuple(name for name in signature(kind).parameters if name not in _sizes(kind))


def _sizes(kind: type[Bias]) -> tuple[str, ...]:
    """num_heads, and those of dim and head_dim that the class has no default for."""
    parameters = signature(kind).parameters
    required = (name for name in ("dim", "head_dim") if name in parameters)
    required = (name for name in required if parameters[name].default is Parameter.empty)
    return ("num_heads", *required)
