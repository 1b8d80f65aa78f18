"""The attention layer that is measured: its inputs, and a pass forward and backward through it."""

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
    """What a layer works on.

    q, k, v and the gradient of o: (1, HEADS, N, head_dim).
    x: hidden states, (1, N, DIM), float32 at least.
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


def draw(length: int, dtype: torch.dtype, head_dim: int = HEAD_DIM) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_o = torch.randn(4, 1, HEADS, length, head_dim, generator=generator)
    return Inputs(q, k, v, torch.randn(1, length, DIM, generator=generator), grad_o).to(dtype)


class Training:
    """Called, it attends and returns o and the gradients of q, k, v and the bias's parameters."""

    def __init__(self, inputs: Inputs, attend: Callable[[], Tensor], bias: nn.Module | None = None):
        self.attend = attend
        self.grad_o = inputs.grad_o
        self.leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
        self.leaves.update(bias.named_parameters() if bias else ())

    def __call__(self) -> dict[str, Tensor]:
        o = self.attend()
        gradients = torch.autograd.grad(o, self.leaves.values(), self.grad_o)
        return {"o": o.detach(), **dict(zip(self.leaves, gradients, strict=True))}
