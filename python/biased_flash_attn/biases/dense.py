"""A bias that is given as a matrix: pair biases, additive masks and anything else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..forms import Dense, Geometry
from ..summary import ShownByShapes


@dataclass(frozen=True, eq=False, repr=False)
class DenseBias(ShownByShapes):
    """b_ij = tensor[i, j].

    The tensor is read in place, in its own dtype. Its gradient has the same shape and is computed
    only if the tensor requires one. -inf masks a pair.

    Args:
        tensor: floating point, broadcastable to (B, H, Nq, Nk); leading dimensions may be missing.
            For packed sequences it is (1 or H, total queries, total keys), and only the pairs
            within a sequence are read. In decoding it is (B or 1, H or 1, queries, keys so far).
            For `context_parallel_attention` it has the rows of this rank's queries and all keys of
            the sequence.

    Raises TypeError or ValueError for anything else.
    """

    tensor: Tensor

    def __post_init__(self):
        if not isinstance(self.tensor, Tensor) or not self.tensor.is_floating_point():
            raise TypeError(f"tensor must be a floating point tensor, not {described(self.tensor)}")
        if not 2 <= self.tensor.dim() <= 4:
            raise ValueError(
                f"tensor has shape {tuple(self.tensor.shape)}; it must be (B or 1, H or 1, Nq, Nk)"
            )

    def lower(
        self, geometry: Geometry, dtype: torch.dtype, device: torch.device | str | None
    ) -> Dense:
        """The tensor, converted if the kernels cannot read its dtype."""
        tensor = self.tensor[(None,) * (4 - self.tensor.dim())]
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
