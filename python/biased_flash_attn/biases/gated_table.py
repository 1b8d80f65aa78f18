"""The gated relative position bias of WavLM (Chen et al., 2022)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .base import Bias
from .parameters import positive_int
from .relative import RelativeBias, states_of_queries
from .tables import T5


class GatedTable(Bias):
    """b_ij = g_i t[bucket(i - j)], with the two-sided buckets of T5 and a gate g from the query.

    Each head's channels x_i of the hidden states determine its gate, g_i = a_i (b_i c - 1) + 2. a_i
    and b_i are the sigmoids of two linear functions of x_i, which the heads share, and c is trained
    per head. Each function is the sum of four outputs of `gate`, as in the authors' code.

    Called on hidden states x (B, N, dim), it returns their `RelativeBias`. WavLM's layers share the
    table, and have gates of their own: assign the same module `table`. Its values are Xavier normal
    initially, c is 1, and `gate` is initialized as nn.Linear does, all as in the authors' code.

    Args:
        dim: channels of x, a multiple of num_heads.
        num_heads: heads of q.
        num_buckets: buckets of both directions together.
        max_distance: the distance from which all keys share the last bucket.

    Raises TypeError or ValueError for invalid arguments.
    """

    inputs = ("x",)

    def __init__(self, dim: int, num_heads: int, num_buckets: int = 320, max_distance: int = 800):
        super().__init__()
        self.num_heads = positive_int("num_heads", num_heads)
        if positive_int("dim", dim) % num_heads:
            raise ValueError(f"dim is {dim}; it must be a multiple of num_heads, {num_heads}")
        self.dim = dim
        self.c = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()
        self.table = _NormalT5(num_heads, num_buckets, max_distance, bidirectional=True)
        self.gate = nn.Linear(dim // num_heads, 8)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.c)

    def forward(
        self, x: Tensor | None = None, q: Tensor | None = None, k: Tensor | None = None
    ) -> RelativeBias:
        """The bias for the queries of hidden states x (B, N, dim): those of the last Nq if q is
        given."""
        x = states_of_queries(x, q, self.dim)
        # Heads last, as the layer would copy the hidden states if they were transposed.
        sums = self.gate(x.unflatten(-1, (self.num_heads, -1))).unflatten(-1, (2, 4)).sum(-1)
        a, b = torch.sigmoid(sums).transpose(1, 2).chunk(2, dim=-1)
        factors = a * (b * self.c[:, None, None] - 1) + 2
        # Larger distances are in the last bucket too.
        reach = self.table.max_distance
        return RelativeBias(factors, self.values, first=-reach, end=reach + 1, beyond="last")

    def values(self, d: Tensor) -> Tensor:
        """t[bucket(d)] for distances d (n,), (num_heads, 1, n) in the dtype of t."""
        return self.table.formula(d).to(self.table.r.dtype)[:, None]


class _NormalT5(T5):
    """T5's table with the initial values of WavLM."""

    def reset_parameters(self) -> None:
        nn.init.xavier_normal_(self.r)
