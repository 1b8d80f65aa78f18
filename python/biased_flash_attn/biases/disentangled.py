"""Disentangled attention, the relative positions of DeBERTa (He et al., 2021)."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from .base import Bias
from .layers import NormalEmbedding, NormalLinear
from .parameters import positive_int
from .relative import RelativeBias, check_heads, check_tensor, rank_of

TERMS = ("c2p", "p2c")


class Disentangled(Bias):
    """b_ij = scale (q_i . W_k e[s(i - j)] + k_j . W_q e[s(i - j)]), with trained embeddings e.

    The terms are content to position, "c2p", and position to content, "p2c". With both, scale is
    1 / sqrt(3 head_dim), which the attention needs for q . k too: pass `scale=disentangled.scale`.

    s limits distances to -span to span - 1. Without buckets, span is max_distance, as in DeBERTa.
    With buckets, as in DeBERTa v2 and v3, span is their number, distances of up to half of it have
    an embedding of their own, and larger ones up to max_distance share logarithmic buckets.

    Called on q and k (B, num_heads, N, head_dim), it returns their `RelativeBias`. W_k and W_q are
    the linear layers `pos_key` and `pos_query`, and e is `embeddings.weight` (2 * span, dim).
    DeBERTa's layers share the embeddings, and in some models pos_key and pos_query are the
    projections of the keys and queries themselves: assign the same module. The initial values are
    those of the authors, normal with standard deviation 0.02 and 0 for biases.

    Args:
        dim: channels of the embeddings.
        num_heads: heads of q and k.
        head_dim: channels of q and k, at most 128; None means dim / num_heads.
        max_distance: the distance from which keys share an embedding.
        buckets: None, or an even number of buckets for each direction, from 4 to
            2 * max_distance - 4.
        terms: those of the two terms that the bias has.
        key_bias: whether pos_key has a bias: not in the first version of DeBERTa.

    Raises TypeError or ValueError for invalid arguments.
    """

    inputs = ("q", "k")

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        max_distance: int = 512,
        buckets: int | None = None,
        terms: tuple[str, ...] = TERMS,
        key_bias: bool = True,
    ):
        super().__init__()
        self.num_heads = positive_int("num_heads", num_heads)
        if head_dim is None:
            head_dim, rest = divmod(positive_int("dim", dim), num_heads)
            if rest:
                raise ValueError(f"dim is {dim}; without head_dim it must divide into {num_heads}")
        self.head_dim = rank_of("head_dim", head_dim)
        self.terms = tuple(terms)
        if self.terms not in (TERMS, TERMS[:1], TERMS[1:]):
            raise ValueError(f"terms is {terms!r}; it must be a nonempty part of {TERMS}")
        self.max_distance = positive_int("max_distance", max_distance)
        self.buckets = None if buckets is None else positive_int("buckets", buckets)
        most = 2 * max_distance - 4  # more would not share any embedding
        if buckets is not None and (buckets % 2 or not 4 <= buckets <= most):
            raise ValueError(f"buckets is {buckets}; it must be None or even, from 4 to {most}")
        self.span = max_distance if buckets is None else buckets
        self.scale = (head_dim * (1 + len(self.terms))) ** -0.5
        self.dim = positive_int("dim", dim)
        self.embeddings = NormalEmbedding(2 * self.span, dim)
        wide = num_heads * head_dim
        self.pos_key = NormalLinear(dim, wide, bias=key_bias) if "c2p" in self.terms else None
        self.pos_query = NormalLinear(dim, wide) if "p2c" in self.terms else None

    def forward(
        self,
        x: Tensor | None = None,
        q: Tensor | None = None,
        k: Tensor | None = None,
        *,
        embeddings: Tensor | None = None,
    ) -> RelativeBias:
        """The bias for q (B, num_heads, N, head_dim) and k, which may have fewer heads that divide
        those of q.

        embeddings: e (2 * span, dim), if not embeddings.weight: DeBERTa v2 normalizes it.
        """
        shape = 2 * self.span, self.dim
        if embeddings is not None and embeddings.shape != shape:
            raise ValueError(f"embeddings has shape {tuple(embeddings.shape)}; it must be {shape}")
        check_heads("q", q, self.num_heads, self.head_dim)
        check_tensor("k", k, 4, f"(B, {self.num_heads}, N, {self.head_dim})")
        if 0 < k.shape[1] < self.num_heads and self.num_heads % k.shape[1] == 0:
            k = k.repeat_interleave(self.num_heads // k.shape[1], dim=1)
        check_heads("k", k, self.num_heads, self.head_dim)
        arguments = {"first": -self.max_distance, "end": self.max_distance + 1, "beyond": "last"}
        for side, x, linear, table in (
            ("query", q, self.pos_key, self.query_table),
            ("key", k, self.pos_query, self.key_table),
        ):
            if linear is not None:
                # With other embeddings, each call has a table of its own.
                table = table if embeddings is None else partial(table, embeddings=embeddings)
                arguments |= {f"{side}_factors": x, f"{side}_tables": table}
        return RelativeBias(**arguments)

    def query_table(self, d: Tensor, embeddings: Tensor | None = None) -> Tensor:
        """scale W_k e[s(d)] for distances d (n,), (num_heads, head_dim, n)."""
        return self._table(self.pos_key, d, embeddings)

    def key_table(self, d: Tensor, embeddings: Tensor | None = None) -> Tensor:
        """scale W_q e[s(d)] for distances d (n,), (num_heads, head_dim, n)."""
        return self._table(self.pos_query, d, embeddings)

    def _table(self, linear: nn.Module, d: Tensor, embeddings: Tensor | None) -> Tensor:
        if embeddings is None:
            embeddings = self.embeddings(torch.arange(2 * self.span, device=d.device))
        # The gradient of advanced indexing would depend on the scheduling of threads.
        vectors = embedding(self.index(d), linear(embeddings))  # (n, num_heads * head_dim)
        return self.scale * vectors.mT.unflatten(0, (self.num_heads, self.head_dim))

    def index(self, d: Tensor) -> Tensor:
        """The embeddings of distances d (n,) in float64: s(d) + span, int64."""
        if self.buckets is not None:
            half = self.buckets // 2
            # Distances up to half keep their own bucket.
            far = d.abs().clamp(min=half)
            growth = math.log((self.max_distance - 1) / half)
            # The bucket of max_distance - 1 is a whole number before it is rounded up.
            wide = torch.log(far / half) / growth * (half - 1) - 1e-9
            bucket = half + torch.ceil(wide)
            d = torch.where(far == half, d, bucket * d.sign())
        return (d + self.span).clamp(0, 2 * self.span - 1).long()
