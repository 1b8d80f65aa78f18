"""Embeddings of positions, rotary embeddings of q and k, and the output layer of a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..biases.layers import NormalEmbedding

BASE = 10000


class SinusoidalEmbedding(nn.Module):
    """sin and cos of m / 10000^(2i/dim) for position m (Vaswani et al., 2017)."""

    def __init__(self, dim: int):
        super().__init__()
        if dim % 2:
            raise ValueError(f"dim is {dim}; it must be even for sinusoidal embeddings")
        self.dim = dim

    def forward(self, positions: Tensor) -> Tensor:
        """Positions (B or 1, N) to embeddings (B or 1, N, dim) float64."""
        angles = angles_of(positions, self.dim)
        return torch.cat([angles.sin(), angles.cos()], -1)


class LearnedEmbedding(nn.Module):
    """A trained vector for each of max_length positions (Gehring et al., 2017)."""

    def __init__(self, dim: int, max_length: int):
        super().__init__()
        self.table = NormalEmbedding(max_length, dim)

    def forward(self, positions: Tensor) -> Tensor:
        """Positions (B or 1, N) to embeddings (B or 1, N, dim).

        Raises ValueError for sequences longer than max_length.
        """
        longest = self.table.num_embeddings
        known = positions.numel() > 0 and not positions.is_meta
        if known and (last := int(positions.max())) >= longest:
            raise ValueError(
                f"tokens has a sequence of {last + 1}; learned positions have at most {longest}"
            )
        return self.table(positions)


class TiedLinear(nn.Linear):
    """The output layer of a model, which shares the weights of its embedding of tokens."""

    def __init__(self, embedding: nn.Embedding, bias: bool = True):
        self.tied = (embedding,)  # not a submodule, whose parameters would have two names
        super().__init__(embedding.embedding_dim, embedding.num_embeddings, bias)

    def reset_parameters(self) -> None:
        """Shares the weights, which the embedding initializes, and sets the bias to 0."""
        self.weight = self.tied[0].weight
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotates pairs of channels of x (B, H, N, D) by angles proportional to the position.

    positions (B or 1, N); channel c is paired with c + D/2 (Su et al., 2021, as in GPT-NeoX).
    """
    angles = angles_of(positions, x.shape[-1])[:, None]
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    first, second = x.to(wide).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def angles_of(positions: Tensor, dim: int) -> Tensor:
    """m / 10000^(2i/dim) for i from 0 to dim/2, (..., dim/2) float64."""
    i = torch.arange(dim // 2, dtype=torch.float64, device=positions.device)
    return positions[..., None] * BASE ** (-2 * i / dim)
