"""The measured attention layer: its inputs, and a forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

HEADS = 8
HEAD_DIM = 64
DIM = 512  # of hidden states


@dataclass(frozen=True)
class Inputs:
    """The inputs of a layer.

    q, k, v and the gradient of o: (batch, heads, N, head_dim).
    x: hidden states, (batch, N, DIM), float32 at least.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    x: Tensor
    grad_o: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        x = self.x.to(torch.promote_types(self.x.dtype, dtype))
        q, k, v = (t.detach().to(dtype).requires_grad_() for t in (self.q, self.k, self.v))
        return Inputs(q, k, v, x, self.grad_o.to(dtype))


def draw(
    length: int,
    dtype: torch.dtype,
    head_dim: int = HEAD_DIM,
    *,
    batch: int = 1,
    heads: int = HEADS,
    device: str = "cpu",
) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    q, k, v, grad_o = normal(4, batch, heads, length, head_dim)
    return Inputs(q, k, v, normal(batch, length, DIM), grad_o).to(dtype)


class Training:
    """A call returns o and the gradients of q, k, v and the bias's parameters."""

    def __init__(self, inputs: Inputs, attend: Callable[[], Tensor], bias: nn.Module | None = None):
        self.attend = attend
        self.grad_o = inputs.grad_o
        self.leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
        parameters = bias.named_parameters() if bias else ()
        # With a prefix: TransformerXL has a parameter v.
        self.leaves.update((f"bias.{name}", p) for name, p in parameters if p.requires_grad)

    def __call__(self) -> dict[str, Tensor]:
        o = self.attend()
        gradients = torch.autograd.grad(o, self.leaves.values(), self.grad_o)
        return {"o": o.detach(), **dict(zip(self.leaves, gradients, strict=True))}

    @torch.no_grad()
    def forward(self) -> Tensor:
        """The result o of a forward pass only."""
        return self.attend()

    def backward(self) -> Callable[[], tuple[Tensor, ...]]:
        """Runs a forward pass and returns its backward pass, which can be repeated."""
        o = self.attend()
        return lambda: torch.autograd.grad(o, self.leaves.values(), self.grad_o, retain_graph=True)
