"""Attention inputs from text that is always available: Python's standard library."""

from dataclasses import dataclass

import click
import torch
from torch import Tensor

from ..extrapolation.experiment.text import standard_library


@dataclass(frozen=True)
class Layer:
    """The inputs of an attention layer.

    x: hidden states, (1, N, heads * head_dim) float32.
    q: (1, heads, Nq, head_dim), the queries of the last Nq tokens.
    k, v: (1, heads, N, head_dim).
    """

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor

    def to(self, dtype: torch.dtype) -> "Layer":
        """Converts q, k and v to dtype, as leaves that require gradients, and x too if dtype is
        wider than float32."""
        x = self.x.to(torch.promote_types(self.x.dtype, dtype))
        return Layer(x, *(t.detach().to(dtype).requires_grad_() for t in (self.q, self.k, self.v)))

    def ending_with(self, i: int) -> "Layer":
        """The sequence up to token i, of whose queries only the last remains."""
        end = i + 1
        return Layer(self.x[:, :end], self.q[:, :, i:end], self.k[:, :, :end], self.v[:, :, :end])


def embedded(text: Tensor, heads: int, head_dim: int, dtype: torch.dtype) -> Layer:
    """A fixed random embedding of bytes (N,), and random projections of it."""
    generator = torch.Generator().manual_seed(0)
    dim = heads * head_dim
    x = torch.randn(256, dim, generator=generator)[None, text.long()]
    weight = torch.randn(dim, 3 * dim, generator=generator) / dim**0.5
    q, k, v = (x @ weight).unflatten(-1, (3, heads, head_dim)).permute(2, 0, 3, 1, 4)
    return Layer(x, q, k, v).to(dtype)


def library_source(n_bytes: int) -> Tensor:
    """The first n_bytes of the standard library's modules in alphabetical order, uint8."""
    text = bytearray()
    for module in sorted(standard_library()):
        text += module.read_bytes()
        if len(text) >= n_bytes:
            return torch.frombuffer(text, dtype=torch.uint8)[:n_bytes]
    raise click.ClickException(f"the standard library has {len(text)} bytes, not {n_bytes}")
