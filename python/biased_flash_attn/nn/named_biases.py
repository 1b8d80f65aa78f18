"""The biases by name: how a layer creates each of them, and what it calls it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import NamedTuple

from torch import Tensor, nn

from .. import biases
from ..biases.distance import PositionBias


class Call(NamedTuple):
    """The arguments of the attention that a bias determines.

    q: the queries of the attention. bias: a bias, or None. scale: the factor of q k^T, or None for
    1 / sqrt(D).
    """

    q: Tensor
    bias: object = None
    scale: float | None = None


# A function of a module and the inputs of a layer: hidden states x (B, N, dim), queries q
# (B, H, Nq, D), which belong to the last of the N tokens, and keys k (B, Hkv, N, D).
Caller = Callable[[nn.Module, Tensor, Tensor, Tensor], Call]


def of_states(module: nn.Module, x: Tensor, q: Tensor, k: Tensor) -> Call:
    return Call(q, module(x))


def of_states_of_queries(module: nn.Module, x: Tensor, q: Tensor, k: Tensor) -> Call:
    return Call(q, module(x[:, x.shape[1] - q.shape[2] :]))


def of_queries(module: nn.Module, x: Tensor, q: Tensor, k: Tensor) -> Call:
    return Call(q, module(q))


def transformer_xl(module: biases.TransformerXL, x: Tensor, q: Tensor, k: Tensor) -> Call:
    return Call(module.queries(q), module(q), module.scale)


def disentangled(module: biases.Disentangled, x: Tensor, q: Tensor, k: Tensor) -> Call:
    return Call(q, module(q, k), module.scale)


@dataclass(frozen=True)
class NamedBias:
    """make creates the module of a class; call calls it with the inputs of a layer.

    sizes are the first arguments of the class, as a function of num_heads and dim. The others are
    options.
    """

    kind: type[nn.Module]
    sizes: Callable[[int, int], tuple[int, ...]]
    call: Caller = of_states

    def make(self, num_heads: int, dim: int, **options) -> nn.Module:
        bias = self.kind(*self.sizes(num_heads, dim), **options)
        return OfPositions(bias) if isinstance(bias, PositionBias) else bias

    @property
    def options(self) -> tuple[str, ...]:
        """The arguments of the class that no layer determines."""
        return tuple(signature(self.kind).parameters)[len(self.sizes(1, 1)) :]


def named(kind: type[nn.Module]) -> NamedBias:
    """A bias that is constructed with num_heads, or with dim and num_heads."""
    if issubclass(kind, PositionBias):
        return NamedBias(kind, lambda heads, dim: (heads,))
    return _of_context(kind)


def _of_context(kind: type[nn.Module], call: Caller = of_states) -> NamedBias:
    return NamedBias(kind, lambda heads, dim: (dim, heads), call)


def _of_head_dim(kind: type[nn.Module], call: Caller) -> NamedBias:
    return NamedBias(kind, lambda heads, dim: (heads, dim // heads), call)


# Biases whose values for a query depend on its content, not only on what is between it and a key.
QUERY_DEPENDENT = {
    "banded_relative": _of_context(biases.BandedRelative, of_states_of_queries),
    "shaw": _of_head_dim(biases.Shaw, of_queries),
    "transformer_xl": _of_head_dim(biases.TransformerXL, transformer_xl),
    "disentangled": _of_context(biases.Disentangled, disentangled),
    "gated_table": _of_context(biases.GatedTable, of_states_of_queries),
}

NAMED = {
    **{
        name: named(kind) for name, kind in (biases.POSITION_BIASES | biases.CONTEXT_BIASES).items()
    },
    **QUERY_DEPENDENT,
}

# Those of `BiasedAttention`. A layer that decodes has the new keys only, and DeBERTa's term of keys
# needs those of all tokens.
BIASES = tuple(name for name in NAMED if name != "disentangled")


class LayerBias(nn.Module):
    """The bias `name` with its parameters, called with the inputs of a layer."""

    def __init__(self, name: str, num_heads: int, dim: int):
        super().__init__()
        self.bias = NAMED[name].make(num_heads, dim)
        self.call = NAMED[name].call

    def forward(self, x: Tensor, q: Tensor, k: Tensor) -> Call:
        return self.call(self.bias, x, q, k)


class OfPositions(nn.Module):
    """A bias of positions with the interface of one computed from hidden states."""

    def __init__(self, bias: nn.Module):
        super().__init__()
        self.bias = bias

    def forward(self, x: Tensor) -> nn.Module:
        return self.bias
