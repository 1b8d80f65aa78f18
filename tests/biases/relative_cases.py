"""Comparisons of relative biases with other computations of the same model."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from biased_flash_attn import biased_flash_attn

REFERENCE = functools.partial(biased_flash_attn, backend="reference")


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def randomized(module: nn.Module) -> nn.Module:
    """In float64, with parameters of magnitude 1 / sqrt(channels): zeros would hide terms."""
    with torch.no_grad():
        for x in module.double().parameters():
            x.normal_(0, x.shape[-1] ** -0.5 if x.dim() > 1 else 1)
    return module.eval()


def assert_same_results(
    ours: Callable[[], Tensor],
    exact: Callable[[], Tensor],
    leaves: dict[str, Tensor],
    tolerance: float = 1e-11,
) -> None:
    """Results and gradients of all leaves agree, relative to the largest one."""
    weights, results = None, []
    for make in (ours, exact):
        y = make()
        weights = torch.randn_like(y) if weights is None else weights
        total = (y * weights).sum()
        results.append((y, *torch.autograd.grad(total, leaves.values(), materialize_grads=True)))
    size = max(x.abs().max().item() for x in results[1])
    for what, mine, theirs in zip(("result", *leaves), *results, strict=True):
        error = (mine - theirs).abs().max().item()
        assert error <= tolerance * size, f"{what}: error {error:.3g}, largest {size:.3g}"


def attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, causal: bool, scale: float) -> Tensor:
    """Attention with a dense bias, as in papers."""
    s = scale * q @ k.mT + bias
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return s.softmax(-1) @ v


def named(*modules: nn.Module, **tensors: Tensor) -> dict[str, Tensor]:
    """The parameters of modules, each once, and other tensors."""
    parameters = {id(x): x for module in modules for x in module.parameters()}
    return {**{f"parameter {n}": x for n, x in enumerate(parameters.values())}, **tensors}
