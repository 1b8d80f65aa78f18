"""The relative positional encoding of Transformer-XL (Dai et al., 2019) and the Conformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .base import Bias
from .layers import NormalLinear, called, dtype_of
from .parameters import finite, positive_int
from .relative import RelativeBias, check_heads, rank_of

ORDERS = ("halves", "interleaved")
_CHUNK = 128  # distances whose sinusoids are computed at a time


class TransformerXL(Bias):
    """Logits scale ((q_i + u) . k_j + (q_i + v) . W_r r[i - j]), with a sinusoid r.

    Called on the queries q (B, num_heads, N, head_dim), it returns the `RelativeBias` of the second
    term. `queries(q)` are q + u, to be passed to the attention as its queries. u and v are vectors
    per head. Negative distances, of keys after the query, have sinusoids of their own, as in the
    Conformer (Gulati et al., 2020).

    r[d] has `dim` channels, sines and cosines of d / 10000^(2 c / dim): first all sines, as in
    Transformer-XL, or with order="interleaved" each sine before its cosine, as in the Conformers of
    ESPnet and NeMo. With max_distance, W_r r is replaced by a trained vector for each head and
    distance from -max_distance to max_distance, which farther keys share.

    Parameters: `u` and `v` (num_heads, head_dim); `w_r.weight` (num_heads * head_dim, dim), or
    `r` (num_heads, head_dim, 2 * max_distance + 1) in the order of the distance. Their initial
    values are those of the authors of Transformer-XL, normal with standard deviation 0.02.

    Args:
        num_heads: heads of q.
        head_dim: channels of q, at most 128.
        dim: channels of the sinusoid, even; None means num_heads * head_dim.
        order: the order of its channels, "halves" or "interleaved".
        max_distance: None for a sinusoid, or the largest distance with a trained vector of its own.
        scale: the factor of both terms; None means 1 / sqrt(head_dim).

    Raises TypeError or ValueError for invalid arguments.
    """

    inputs = ("q",)

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        dim: int | None = None,
        *,
        order: str = "halves",
        max_distance: int | None = None,
        scale: float | None = None,
    ):
        super().__init__()
        self.num_heads = positive_int("num_heads", num_heads)
        self.head_dim = rank_of("head_dim", head_dim)
        self.dim = num_heads * head_dim if dim is None else positive_int("dim", dim)
        if order not in ORDERS:
            raise ValueError(f"order is {order!r}; it must be one of {ORDERS}")
        self.order, self.max_distance = order, max_distance
        self.scale = head_dim**-0.5 if scale is None else finite("scale", scale)
        self.u = nn.Parameter(torch.empty(num_heads, head_dim))
        self.v = nn.Parameter(torch.empty(num_heads, head_dim))
        self.r = None
        if max_distance is not None:
            n = 2 * positive_int("max_distance", max_distance) + 1
            self.r = nn.Parameter(torch.empty(num_heads, head_dim, n))
        elif self.dim % 2:
            raise ValueError(f"dim is {self.dim}; it must be even")
        self.reset_parameters()
        if max_distance is None:
            self.w_r = NormalLinear(self.dim, num_heads * head_dim, bias=False)

    def reset_parameters(self) -> None:
        for x in (self.u, self.v, self.r):
            if x is not None:
                nn.init.normal_(x, std=0.02)

    def forward(
        self, x: Tensor | None = None, q: Tensor | None = None, k: Tensor | None = None
    ) -> RelativeBias:
        """The bias for queries q (B, num_heads, N, head_dim), to which v is added here."""
        check_heads("q", q, self.num_heads, self.head_dim)
        factors = q + self.v.to(q.dtype)[:, None]
        if self.max_distance is None:
            return RelativeBias(factors, self.table)
        ends = {"first": -self.max_distance, "end": self.max_distance + 1, "beyond": "last"}
        return RelativeBias(factors, self.trained_table, **ends)

    def queries(self, q: Tensor) -> Tensor:
        """q + u, the queries of the attention, for q (B, num_heads, N, head_dim)."""
        check_heads("q", q, self.num_heads, self.head_dim)
        return q + self.u.to(q.dtype)[:, None]

    def table(self, d: Tensor) -> Tensor:
        """scale W_r r[d] for distances d (n,), (num_heads, head_dim, n) in the dtype of W_r."""
        dtype = dtype_of(self.w_r)
        # In float64, all sinusoids are larger than q. Compilers need a fixed number of parts.
        parts = (d,) if torch.compiler.is_compiling() else d.split(_CHUNK)
        r = torch.cat([self.sinusoid(part).to(dtype) for part in parts])
        return self.scale * called(self.w_r, r, dtype).mT.unflatten(
            0, (self.num_heads, self.head_dim)
        )

    def trained_table(self, d: Tensor) -> Tensor:
        """scale r[d] for distances d (n,), (num_heads, head_dim, n) in the dtype of r."""
        return self.scale * self.r[..., d.long() + self.max_distance]

    def sinusoid(self, d: Tensor) -> Tensor:
        """r at distances d (n,), (n, dim) float64."""
        channel = torch.arange(0, self.dim, 2, dtype=torch.float64, device=d.device)
        angles = d.double()[:, None] * 10000 ** (-channel / self.dim)
        parts = angles.sin(), angles.cos()
        return torch.cat(parts, -1) if self.order == "halves" else torch.stack(parts, -1).flatten(1)
