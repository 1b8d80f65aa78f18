"""Creates any bias by name, as a module that is called on hidden states."""

from __future__ import annotations

from torch import Tensor, nn

from .. import biases

BIASES = (*biases.POSITION_BIASES, *biases.CONTEXT_BIASES)


def make_bias(name: str, num_heads: int, dim: int) -> nn.Module:
    """A module that maps hidden states (B, N, dim) to the bias `name`."""
    if name in biases.CONTEXT_BIASES:
        return biases.CONTEXT_BIASES[name](dim, num_heads)
    return OfPositions(biases.POSITION_BIASES[name](num_heads))


class OfPositions(nn.Module):
    """A bias of positions with the interface of one computed from hidden states."""

    def __init__(self, bias: nn.Module):
        super().__init__()
        self.bias = bias

    def forward(self, x: Tensor) -> nn.Module:
        return self.bias
