"""The biases of the supported models, expressed by this package's forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...biases import CumulativeBias, DistanceBias
from ...biases.distance import PositionBias
from ...forms import Distance, Geometry, Linear
from .token_mask import TokenMask


class Slopes(PositionBias):
    """b(d) = -m |d| with a model's own fixed slopes m, (num_heads,).

    They are not a buffer, so that casting the model does not round them.
    """

    fixed = True

    def __init__(self, slopes: Tensor):
        super().__init__(len(slopes))
        self.slopes = slopes.double()

    def lower(
        self, geometry: Geometry, dtype: torch.dtype, device: torch.device | str | None
    ) -> Linear:
        def make() -> Tensor:
            return self.slopes[None].to(dtype=dtype, device=device)

        return Linear(self._cached((dtype, device), make))


def bias_of_keys(values: Tensor, mask: TokenMask) -> CumulativeBias:
    """b_ij = values_j - values_i, from values per key and head, (B, H, n_key)."""
    if mask.has_holes:
        values = mask.packing.keys.pack(values.transpose(1, 2)).transpose(1, 2)
    values = values.double()
    return CumulativeBias(-values.diff(dim=-1, prepend=values[..., :1]))


@dataclass(frozen=True)
class Values:
    """The vectors (n, H) of an embedding.

    It is called, as it may have an adapter, and wherever they are used: a checkpointed layer that
    is recomputed has a graph of its own.
    """

    table: nn.Module
    n: int

    def __call__(self) -> Tensor:
        return self.table(torch.arange(self.n, device=next(self.table.parameters()).device))


class BucketTable(DistanceBias):
    """b(d) = values[buckets(d), h] for signed distances d."""

    def __init__(self, num_heads: int, values: Callable[[], Tensor], buckets):
        super().__init__(num_heads)
        self.values, self.buckets = values, buckets

    def formula(self, d: Tensor) -> Tensor:
        return torch.nn.functional.embedding(self.buckets(d.long()), self.values().double()).T


class SharedTable:
    """A function of the distance that is evaluated once for all layers of a forward pass.

    buckets maps signed distances (n,) to int64 rows of the values (buckets, num_heads).
    """

    def __init__(
        self, num_heads: int, values: Callable[[], Tensor], buckets: Callable[[Tensor], Tensor]
    ):
        self.num_heads = num_heads
        self.bias = BucketTable(num_heads, values, buckets)
        self.differentiable = torch.is_grad_enabled()
        self.latest: tuple | None = None

    def lower(
        self, geometry: Geometry, dtype: torch.dtype, device: torch.device | str | None
    ) -> Distance:
        # Each recomputation of a checkpointed layer frees the graph that it used.
        if torch.is_grad_enabled() and not self.differentiable:
            return self.bias.lower(geometry, dtype, device)
        key = (geometry.first_distance, geometry.n_distances, dtype, device)
        if self.latest is None or self.latest[0] != key:
            self.latest = key, self.bias.lower(geometry, dtype, device)
        return self.latest[1]
