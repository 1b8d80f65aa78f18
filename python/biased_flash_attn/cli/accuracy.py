"""Errors of outputs and gradients against float64, on sampled queries.

Under a causal mask query i is the last query of the sequence that ends with it. So naive attention
can compute it alone, without any N x N matrix. The gradients are those of a loss that depends only
on the sampled queries.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import biased_flash_attn
from ..backends.reference import attention
from ..error_bound import error_bound
from ..geometry import Geometry
from .baselines import naive
from .text import Layer

SMALLEST = sys.float_info.min
# The gradient of a parameter sums signed terms of all pairs, which largely cancel.
SUM_ROUNDINGS = 64
CANCELLED = 1e-12  # what float64 leaves of sums that cancel


@dataclass(frozen=True)
class Exact:
    """Outputs and gradients in float64, and the magnitude of their terms.

    Gradients are sums over queries. A sum with cancellation cannot be more accurate than its terms,
    so its size is the largest entry of the sum of their absolute values. Where even the terms are
    sums that cancel, as for a constant added to all logits, it is the largest size of the others.
    """

    values: dict[str, Tensor]
    sizes: dict[str, float]


class Sample:
    """Some queries of a layer, and the gradient of a loss with respect to their outputs."""

    def __init__(self, layer: Layer, n_queries: int = 8):
        generator = torch.Generator().manual_seed(1)
        n, head_dim = layer.v.shape[-2:]
        inner = torch.randperm(n, generator=generator)[:n_queries]
        self.queries = torch.cat([torch.tensor([0, n - 1]), inner]).unique()
        shape = (*layer.v.shape[:2], len(self.queries), head_dim)
        self.grad = torch.randn(shape, generator=generator).to(layer.v.dtype)

    def ours(self, module: nn.Module, layer: Layer) -> dict[str, Tensor]:
        """Outputs at the queries, and gradients of the layer and the module, by name."""
        o = biased_flash_attn(layer.q, layer.k, layer.v, module(layer.x))[:, :, self.queries]
        leaves = differentiated(module, layer)
        gradients = torch.autograd.grad(o, leaves.values(), self.grad)
        return {"o": o.detach(), **dict(zip(leaves, gradients, strict=True))}

    def naive(self, module: nn.Module, layer: Layer) -> dict[str, Tensor]:
        """The same in plain PyTorch, in the layer's dtype."""
        totals, _ = summed(self.contributions(naive, module, layer))
        return totals

    def exact(self, module: nn.Module, layer: Layer) -> Exact:
        """The same in float64."""
        module = copy.deepcopy(module).double()
        layer = layer.to(torch.float64)
        totals, sizes = summed(self.contributions(last_query_exactly, module, layer))
        return Exact(totals, sizes_of(sizes))

    def contributions(
        self, attend: Callable, module: nn.Module, layer: Layer
    ) -> Iterator[dict[str, Tensor]]:
        """The contributions of each query, computed by attend(q, k, v, bias)."""
        leaves = differentiated(module, layer)
        for n, i in enumerate(self.queries.tolist()):
            q, k, v = layer.q[:, :, i : i + 1], layer.k[:, :, : i + 1], layer.v[:, :, : i + 1]
            row = attend(q, k, v, module(layer.x[:, : i + 1]))
            grad = self.grad[:, :, n : n + 1].to(row.dtype)
            gradients = torch.autograd.grad(row, leaves.values(), grad)
            o = torch.zeros_like(self.grad, dtype=row.dtype)
            o[:, :, n : n + 1] = row.detach()
            yield {"o": o, **dict(zip(leaves, gradients, strict=True))}


def summed(parts: Iterable[dict[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The sums of each tensor and of its absolute values, in float64."""
    totals: dict[str, Tensor] = {}
    sizes: dict[str, Tensor] = {}
    for part in parts:
        for name, t in part.items():
            t = t.double()
            totals[name] = totals[name] + t if name in totals else t
            sizes[name] = sizes[name] + t.abs() if name in sizes else t.abs()
    return totals, sizes


def last_query_exactly(q: Tensor, k: Tensor, v: Tensor, bias) -> Tensor:
    n_key = k.shape[2]
    o, _ = attention(q, k, v, bias.dense(1, n_key), Geometry(1, n_key), q.shape[-1] ** -0.5)
    return o


def differentiated(module: nn.Module, layer: Layer) -> dict[str, Tensor]:
    """The tensors whose gradients are computed, by name."""
    return {"q": layer.q, "k": layer.k, "v": layer.v, **dict(module.named_parameters())}


def sizes_of(tensors: dict[str, Tensor]) -> dict[str, float]:
    """The largest entry of each float64 tensor, or of any tensor where it is a rounding error."""
    largest = {name: float(t.abs().max()) for name, t in tensors.items()}
    everything = max(largest.values())
    return {name: x if x > CANCELLED * everything else everything for name, x in largest.items()}


def errors(found: dict[str, Tensor], exact: Exact) -> dict[str, float]:
    """The largest error of each tensor, relative to its size."""
    return {
        name: float((found[name].double() - value).abs().max()) / max(exact.sizes[name], SMALLEST)
        for name, value in exact.values.items()
    }


def tolerated(plain: dict[str, Tensor], exact: Exact, dtype: torch.dtype) -> dict[str, float]:
    """The largest permitted error of each tensor, relative to its size."""
    naive_errors = errors(plain, exact)
    return {
        name: error_bound(error, dtype, float32_roundings=SUM_ROUNDINGS)
        for name, error in naive_errors.items()
    }
