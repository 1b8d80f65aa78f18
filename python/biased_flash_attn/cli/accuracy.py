"""Errors of outputs and gradients against float64, on sampled queries.

Under a causal mask query i is the last query of the sequence that ends with it. So naive attention
can compute it alone, without any N x N matrix. The gradients are those of a loss that depends only
on the sampled queries.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from .. import biased_flash_attn
from ..biases import Bias
from ..exactness import Sums, compared, largest, summed
from ..nn.named_biases import applied
from .baselines import naive
from .text import Layer


class Sample:
    """Some queries of a layer, and the gradient of a loss with respect to their outputs."""

    def __init__(self, layer: Layer, n_queries: int = 8):
        generator = torch.Generator().manual_seed(1)
        n, head_dim = layer.v.shape[-2:]
        inner = torch.randperm(n, generator=generator)[:n_queries]
        self.queries = torch.cat([torch.tensor([0, n - 1]), inner]).unique()
        shape = (*layer.v.shape[:2], len(self.queries), head_dim)
        self.grad = torch.randn(shape, generator=generator).to(layer.v.dtype)
        # The first query has one key and weight 1, so the gradient of its logit is zero. Kernels
        # leave a rounding there, of numbers that are large compared with the other gradients.
        self.grad[:, :, 0] = 0

    def ours(self, module: Bias, layer: Layer) -> dict[str, Tensor]:
        """Outputs at the queries, and gradients of the layer and the module, by name."""
        o = attend(module, layer)[:, :, self.queries]
        leaves = differentiated(module, layer)
        gradients = torch.autograd.grad(o, leaves.values(), self.grad)
        return {"o": o.detach(), **dict(zip(leaves, gradients, strict=True))}

    def naive(self, module: Bias, layer: Layer) -> dict[str, Tensor]:
        """The same in plain PyTorch, in the layer's dtype."""
        return summed(self.naive_terms(module, layer)).values

    def exact(self, module: Bias, layer: Layer) -> Sums:
        """The same in float64."""
        module = copy.deepcopy(module).double()
        return summed(self.exact_terms(module, layer.to(torch.float64)))

    def naive_terms(self, module: Bias, layer: Layer) -> Iterator[dict[str, Tensor]]:
        """The contributions of each query."""
        leaves = differentiated(module, layer)
        for n, i in enumerate(self.queries.tolist()):
            row = naive(module, layer.ending_with(i))
            gradients = torch.autograd.grad(row, leaves.values(), self.grad[:, :, n : n + 1])
            yield {"o": self.only(n, row), **dict(zip(leaves, gradients, strict=True))}

    def exact_terms(self, module: Bias, layer: Layer) -> Iterator[dict[str, Tensor]]:
        """The contributions of each query, and those of positive and negative dS to parameters.

        The gradients of a query's logits sum to zero. What a parameter changes about alike for all
        keys therefore cancels within each query: entirely for a constant added to all logits.
        """
        qkv = {"q": layer.q, "k": layer.k, "v": layer.v}
        parameters = parameters_of(module)
        for n, i in enumerate(self.queries.tolist()):
            last = layer.ending_with(i)
            s = exact_logits(module, last)
            row = s.softmax(-1) @ last.v
            grad = self.grad[:, :, n : n + 1].double()
            *gradients, ds = torch.autograd.grad(row, [*qkv.values(), s], grad, retain_graph=True)
            if parameters:
                for part in (ds.clamp(min=0), ds.clamp(max=0)):
                    terms = torch.autograd.grad(s, parameters.values(), part, retain_graph=True)
                    yield dict(zip(parameters, terms, strict=True))
            yield {"o": self.only(n, row), **dict(zip(qkv, gradients, strict=True))}

    def only(self, n: int, row: Tensor) -> Tensor:
        """Outputs at the queries: those of the n-th, zero elsewhere."""
        o = torch.zeros_like(self.grad, dtype=row.dtype)
        o[:, :, n : n + 1] = row.detach()
        return o


def attend(module: Bias, layer: Layer) -> Tensor:
    """The attention of a layer, (1, H, N, D)."""
    q, bias, scale = applied(module, layer.x, layer.q, layer.k)
    return biased_flash_attn(q, layer.k, layer.v, bias, scale=scale)


def exact_logits(module: Bias, layer: Layer) -> Tensor:
    """The logits of the only query of a float64 layer, (1, H, 1, N)."""
    q, bias, scale = applied(module, layer.x, layer.q, layer.k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return scale * q @ layer.k.mT + bias.dense(1, layer.k.shape[2])


def differentiated(module: Bias, layer: Layer) -> dict[str, Tensor]:
    """The tensors whose gradients are computed, by name."""
    return {"q": layer.q, "k": layer.k, "v": layer.v, **parameters_of(module)}


def parameters_of(module: Bias) -> dict[str, Tensor]:
    return {f"bias.{name}": parameter for name, parameter in module.named_parameters()}


def errors(
    found: dict[str, Tensor], naive: dict[str, Tensor], exact: Sums, dtype: torch.dtype
) -> dict[str, tuple[float, float]]:
    """The largest error of each tensor and its bound, relative to the size of the tensor."""
    pairs = {}
    for name, value in exact.values.items():
        size = largest(exact.magnitudes[name])
        error, bound = compared(found[name], value, naive[name], size, dtype)
        pairs[name] = float(error), float(bound)
    return pairs
