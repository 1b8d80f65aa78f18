"""Attention layers with every bias of the package, and layers with adapters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from biased_flash_attn import biased_flash_attn, biases

CHANNELS, HEADS, HEAD_DIM = 12, 2, 8
QUERY_BIASES = {
    "transformer_xl": lambda: biases.TransformerXL(HEADS, HEAD_DIM, CHANNELS),
    "shaw": lambda: biases.Shaw(HEADS, HEAD_DIM),
    "disentangled": lambda: biases.Disentangled(CHANNELS, HEADS, HEAD_DIM, max_distance=16),
    "banded": lambda: biases.BandedRelative(CHANNELS, HEADS, extent=16, rank=4),
    "gated_table": lambda: biases.GatedTable(CHANNELS, HEADS),
}
MODULES = {
    "none": lambda: None,
    **{name: lambda make=make: make(HEADS) for name, make in biases.POSITION_BIASES.items()},
    **{
        name: lambda make=make: make(CHANNELS, HEADS)
        for name, make in biases.CONTEXT_BIASES.items()
    },
    **QUERY_BIASES,
}


class Attention(nn.Module):
    """Of a layer, with any bias of the package."""

    def __init__(self, name: str, causal: bool = True):
        super().__init__()
        self.of_states, self.of_queries = name in biases.CONTEXT_BIASES, name in QUERY_BIASES
        self.bias, self.causal = MODULES[name](), causal
        self.projection = nn.Linear(CHANNELS, 3 * HEADS * HEAD_DIM)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.projection(x).unflatten(-1, (3, HEADS, HEAD_DIM))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        bias = self.bias
        if self.of_states:
            bias = bias(x)
        elif self.of_queries:
            bias = bias(x, q, k)
        o = biased_flash_attn(q, k, v, bias, causal=self.causal)
        return o.transpose(1, 2).flatten(2)


class Adapted(nn.Module):
    """A layer with an adapter of low rank, as in LoRA (Hu et al., 2021), without its scale."""

    def __init__(self, layer: nn.Linear | nn.Embedding):
        super().__init__()
        n_out, n_in = layer.weight.shape
        if isinstance(layer, nn.Embedding):
            n_out, n_in = n_in, n_out
        self.layer = layer
        self.a, self.b = (nn.Parameter(torch.randn(shape)) for shape in ((2, n_in), (n_out, 2)))

    @property
    def weight(self) -> Tensor:
        """The layer's own, as in peft."""
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        a = self.a.mT[x] if isinstance(self.layer, nn.Embedding) else x @ self.a.mT
        return self.layer(x) + a @ self.b.mT
