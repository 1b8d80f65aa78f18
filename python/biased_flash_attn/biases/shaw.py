"""Relative position representations (Shaw et al., 2018): a trained vector for each distance."""

from __future__ import annotations

from torch import Tensor

from .base import Bias
from .layers import XavierEmbedding
from .parameters import finite, positive_int
from .relative import RelativeBias, check_heads, nonnegative_int, rank_of


class Shaw(Bias):
    """b_ij = scale q_i . a[clip(j - i, -left, right)], with the vectors a trained.

    Called on the queries q (B, num_heads, N, head_dim), it returns their `RelativeBias`. All heads
    share the vectors. As in the paper, the product has the scale of q . k.

    The paper's vectors for the keys are supported, as in w2v-BERT 2.0 and SpeechT5, and those that
    it adds to the values are not.

    The parameter `distance_embedding.weight` (left + right + 1, head_dim) begins with the farthest
    key before the query. Its initial values are Xavier uniform, as in fairseq2.

    Args:
        num_heads: heads of q.
        head_dim: channels of q, at most 128.
        left: the largest distance of a key before the query that has a vector of its own.
        right: the same for keys after the query; None means the same as left.
        scale: the factor of q . a, and of q . k in the attention; None means 1 / sqrt(head_dim).

    Raises TypeError or ValueError for invalid arguments.
    """

    inputs = ("q",)

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        left: int = 16,
        right: int | None = None,
        scale: float | None = None,
    ):
        super().__init__()
        self.num_heads = positive_int("num_heads", num_heads)
        self.head_dim = rank_of("head_dim", head_dim)
        self.left = nonnegative_int("left", left)
        self.right = left if right is None else nonnegative_int("right", right)
        self.scale = head_dim**-0.5 if scale is None else finite("scale", scale)
        self.distance_embedding = XavierEmbedding(self.left + self.right + 1, head_dim)

    def forward(
        self, x: Tensor | None = None, q: Tensor | None = None, k: Tensor | None = None
    ) -> RelativeBias:
        """The bias for queries q (B, num_heads, N, head_dim)."""
        check_heads("q", q, self.num_heads, self.head_dim)
        ends = {"first": -self.right, "end": self.left + 1, "beyond": "last"}
        return RelativeBias(q, self.table, **ends)

    def table(self, d: Tensor) -> Tensor:
        """scale a[-d] for distances d = i - j (n,), (1, head_dim, n)."""
        vectors = self.distance_embedding((self.left - d).long())
        return self.scale * vectors.mT[None]
