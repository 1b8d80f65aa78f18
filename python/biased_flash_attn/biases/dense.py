"""A bias that is given as a matrix: pair biases, additive masks and anything else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..forms import Dense, Geometry
from ..summary import ShownByShapes


@dataclass(frozen=True, eq=False, repr=False)
class DenseBias(ShownByShapes):
    """b_ij = tensor[i, j], or 0 where a boolean tensor is True and -inf, which masks a pair, where
    it is False.

    A floating point tensor is read in place, in its own dtype. Its gradient has the same shape and
    is computed only if the tensor requires one. Its values are not checked: a NaN propagates to the
    results of its query. Only decoding on CPUs refuses it.

    Args:
        tensor: floating point, or bool with True for pairs that take part, broadcastable to
            (B, H, Nq, Nk); leading dimensions may be missing.
            For packed sequences it is (1 or H, total queries, total keys), and only the pairs
            within a sequence are read. In decoding it is (B or 1, H or 1, queries, keys so far).
            For `context_parallel_attention` it has the rows of this rank's queries and all keys of
            the sequence.

    Raises TypeError or ValueError for anything else.
    """

    tensor: Tensor

    def __post_init__(self):
        known = isinstance(self.tensor, Tensor)
        if not known or not (self.tensor.is_floating_point() or self.tensor.dtype == torch.bool):
            raise TypeError(
                f"tensor must be a floating point or bool tensor, not {described(self.tensor)}"
            )
        if not 2 <= self.tensor.dim() <= 4:
            raise ValueError(
                f"tensor has shape {tuple(self.tensor.shape)}; it must be (B or 1, H or 1, Nq, Nk)"
            )

    def lower(
        self, geometry: Geometry, dtype: torch.dtype, device: torch.device | str | None
    ) -> Dense:
        """The tensor, converted if the kernels cannot read its dtype."""
        tensor = self.tensor[(None,) * (4 - self.tensor.dim())]
        if tensor.dtype == torch.bool:  # 0 and -inf are exact in any dtype
            zeros = torch.zeros_like(tensor, dtype=torch.bfloat16)
            tensor = zeros.masked_fill_(~tensor, -torch.inf)
        if torch.float64 in (dtype, tensor.dtype):
            tensor = tensor.to(dtype)
        rows = geometry.query_rows, geometry.key_rows
        sizes = [own if n == 1 else -1 for n, own in zip(tensor.shape[2:], rows, strict=True)]
        return Dense(tensor.expand(-1, -1, *sizes))

    def dense(self, n_query: int, n_key: int) -> Tensor:
        """The bias of every pair, (B or 1, H or 1, n_query, n_key) float64, unmasked."""
        geometry = Geometry(n_query, n_key, causal=False)
        return self.lower(geometry, torch.float64, self.tensor.device).dense(geometry)


def described(value: object) -> str:
    return f"a {value.dtype} tensor" if isinstance(value, Tensor) else type(value).__name__
