"""One bias on one layer: is it exact, and what does it cost?"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import biased_flash_attn
from .accuracy import Sample, differentiated, errors, tolerated
from .baselines import dense_mask, naive, sdpa
from .cost import Cost, cost
from .text import Layer


@dataclass(frozen=True)
class Trial:
    """Errors and what is tolerated, by tensor; costs of a forward and backward pass.

    naive and sdpa are None where they would not fit into memory.
    """

    errors: dict[str, float]
    tolerated: dict[str, float]
    ours: Cost
    naive: Cost | None
    sdpa: Cost | None

    @property
    def output_error(self) -> float:
        return self.errors["o"]

    @property
    def gradient_error(self) -> float:
        return max(error for name, error in self.errors.items() if name != "o")

    @property
    def passed(self) -> bool:
        return all(error <= self.tolerated[name] for name, error in self.errors.items())


def trial(module: nn.Module, layer: Layer) -> Trial:
    dtype = layer.q.dtype
    sample = Sample(layer)
    exact = sample.reference(module, layer, torch.float64)
    plain = sample.reference(module, layer, dtype)
    ours = sample.ours(module, layer)
    return Trial(errors(ours, exact), tolerated(plain, exact, dtype), *costs(module, layer))


def costs(module: nn.Module, layer: Layer) -> tuple[Cost, Cost | None, Cost | None]:
    """Of this package, of naive attention, and of PyTorch's own with the bias as a fixed mask."""
    q, k, v = layer.q, layer.k, layer.v
    leaves = differentiated(module, layer).values()
    grad = torch.randn_like(v)

    def differentiate(attend: Callable[[], Tensor], leaves: Iterable[Tensor]) -> Callable:
        return lambda: torch.autograd.grad(attend(), tuple(leaves), grad)

    call = differentiate(lambda: biased_flash_attn(q, k, v, module(layer.x)), leaves)
    ours = cost(call, repeats=3)
    if not dense_fits(layer):
        return ours, None, None
    call = differentiate(lambda: naive(layer, module(layer.x)), leaves)
    plain = cost(call)
    mask = dense_mask(module(layer.x), q.dtype, q.shape[2])
    call = differentiate(lambda: sdpa(layer, mask), (q, k, v))
    return ours, plain, cost(call, held=mask.nbytes)


def dense_fits(layer: Layer) -> bool:
    """Whether half of the machine's memory holds the N x N matrices of naive attention."""
    _, heads, n, _ = layer.q.shape
    matrices = 6 * heads * n**2 * layer.q.element_size()
    return 2 * matrices < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
