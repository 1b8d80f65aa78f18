"""Accuracy and cost of one bias on one layer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..biases import Bias
from .accuracy import Sample, attend, differentiated, errors
from .baselines import naive, sdpa
from .cost import Cost, cost
from .text import Layer


@dataclass(frozen=True)
class Trial:
    """The error of each tensor and its bound; costs of a forward and backward pass."""

    errors: dict[str, tuple[float, float]]
    ours: Cost
    naive: Cost | None
    sdpa: Cost | None

    @property
    def output_error(self) -> float:
        return self.errors["o"][0]

    @property
    def gradient_error(self) -> float:
        return max(error for name, (error, _) in self.errors.items() if name != "o")

    @property
    def passed(self) -> bool:
        return all(error <= bound for error, bound in self.errors.values())


def trial(module: Bias, layer: Layer, mask: Tensor | None) -> Trial:
    """Measures one bias. The contents of the dense mask for SDPA do not affect its cost.

    Without a mask the alternatives with N x N matrices are not measured.
    """
    sample = Sample(layer)
    results = (compute(module, layer) for compute in (sample.ours, sample.naive, sample.exact))
    found = errors(*results, layer.q.dtype)

    leaves = tuple(differentiated(module, layer).values())
    ours = training_cost(lambda: attend(module, layer), leaves, repeats=3)
    dense = sdpa_cost = None
    if mask is not None:
        dense = training_cost(lambda: naive(module, layer), leaves)
        qkv = (layer.q, layer.k, layer.v)
        sdpa_cost = training_cost(lambda: sdpa(layer, mask), qkv, held=mask.nbytes)
    return Trial(found, ours, dense, sdpa_cost)


def training_cost(
    compute: Callable[[], Tensor], leaves: tuple[Tensor, ...], repeats: int = 1, held: int = 0
) -> Cost:
    """The cost of a forward pass and of the backward pass to the leaves."""

    def forward_and_backward():
        o = compute()
        torch.autograd.grad(o, leaves, torch.ones_like(o))

    return cost(forward_and_backward, repeats, held)
