"""Errors of outputs and gradients against float64, on sampled queries.

Under a causal mask query i is the last query of the sequence that ends with it. So naive attention
can be asked for it alone, and nothing of size N x N is ever needed. The gradients are those of a
loss that looks at the sampled queries only.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import biased_flash_attn
from ..forms import Geometry
from ..reference import attention
from .baselines import naive
from .text import Layer


class Sample:
    """Some queries of a layer, and the gradient of a loss with respect to their outputs."""

    def __init__(self, layer: Layer, n_queries: int = 16):
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
        return self.one_by_one(naive, module, layer)

    def exact(self, module: nn.Module, layer: Layer) -> dict[str, Tensor]:
        """The same in float64."""
        module = copy.deepcopy(module).double()
        return self.one_by_one(last_query_exactly, module, layer.to(torch.float64))

    def one_by_one(self, attend: Callable, module: nn.Module, layer: Layer) -> dict[str, Tensor]:
        """The same by attend(q, k, v, bias) on each query and the keys up to it."""
        leaves = differentiated(module, layer)
        gradients = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in leaves.items()}
        outputs = []
        for n, i in enumerate(self.queries.tolist()):
            q, k, v = layer.q[:, :, i : i + 1], layer.k[:, :, : i + 1], layer.v[:, :, : i + 1]
            o = attend(q, k, v, module(layer.x[:, : i + 1]))
            outputs.append(o.detach())
            grad = self.grad[:, :, n : n + 1].to(o.dtype)
            for name, g in zip(leaves, torch.autograd.grad(o, leaves.values(), grad), strict=True):
                gradients[name] += g
        return {"o": torch.cat(outputs, 2), **gradients}


def last_query_exactly(q: Tensor, k: Tensor, v: Tensor, bias) -> Tensor:
    n_key = k.shape[2]
    o, _ = attention(q, k, v, bias.dense(1, n_key), Geometry(1, n_key), q.shape[-1] ** -0.5)
    return o


def differentiated(module: nn.Module, layer: Layer) -> dict[str, Tensor]:
    """What gradients are taken of, by name."""
    return {"q": layer.q, "k": layer.k, "v": layer.v, **dict(module.named_parameters())}


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The largest error of each tensor, relative to its largest entry."""
    return {name: relative_error(found[name], exact[name]) for name in exact}


def relative_error(found: Tensor, exact: Tensor) -> float:
    size = exact.abs().max().clamp(min=torch.finfo(exact.dtype).tiny)
    return float((found.double() - exact).abs().max() / size)


def tolerated(
    plain: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, float]:
    """Errors to stay within: twice those of naive attention in dtype, plus a band for rounding."""
    # The result is rounded to dtype; sums are in float32, in another order than naive attention's.
    # The gradient of a bias's parameter sums signed terms of all tokens, which largely cancel.
    n_tokens = exact["k"].shape[2]
    roundings = {name: 16 if name in "oqkv" else 4 * n_tokens**0.5 for name in exact}
    eps, eps_of_sums = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    return {
        name: 2 * error + eps + roundings[name] * eps_of_sums
        for name, error in errors(plain, exact).items()
    }
