"""The forget gate of the Forgetting Transformer, FoX (Lin et al., 2025)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from .base import Bias
from .cumulative import CumulativeBias, per_head
from .parameters import positive_int


class ForgetGate(Bias):
    """b_ij = sum of log sigmoid(x_t w_f + b_f) over j < t <= i: the log of the gates between."""

    inputs = ("x",)

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads = positive_int("num_heads", num_heads)
        self.dim = positive_int("dim", dim)
        self.gate = nn.Linear(dim, num_heads)

    def forward(
        self, x: Tensor | None = None, q: Tensor | None = None, k: Tensor | None = None
    ) -> CumulativeBias:
        """The bias for hidden states x (B, N, dim) of the N keys."""
        (gate,) = per_head(x, self.dim, self.gate)
        return CumulativeBias(logsigmoid(gate))
