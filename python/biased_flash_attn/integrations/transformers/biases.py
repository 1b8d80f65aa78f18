"""The biases that these models bring along, as numbers of this package's forms."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...biases import CumulativeBias, DistanceBias
from ...biases.base import PositionBias
from ...forms import Distance, Geometry, Linear
from .token_mask import TokenMask


class Slopes(PositionBias):
    """b(d) = -m |d| with a model's own slopes m, (num_heads,), which are never trained.

    They are no buffer: casting the model must not round them.
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
    """b_ij = values_j - values_i, from a number for each key and head, (B, H, n_key)."""
    if mask.has_holes:
        keys = mask.packing.keys
        values = values.transpose(1, 2).flatten(0, 1)[keys].T[None]
    values = values.double()
    return CumulativeBias(-values.diff(dim=-1, prepend=values[..., :1]))


class SharedTable:
    """A function of the distance that is evaluated once, for all layers of one forward pass.

    buckets gives the int64 entries of weight (buckets, H) for signed distances (n,).
    """

    def __init__(self, weight: Tensor, buckets: Callable[[Tensor], Tensor]):
        def function(d: Tensor) -> Tensor:
            return torch.nn.functional.embedding(buckets(d.long()), weight.double()).T

        self.num_heads = weight.shape[1]
        self.bias = DistanceBias.from_function(function, self.num_heads, signed=True)
        self.differentiable = torch.is_grad_enabled()
        self.last: tuple | None = None

    def lower(
        self, geometry: Geometry, dtype: torch.dtype, device: torch.device | str | None
    ) -> Distance:
        # Each layer that is computed again for its backward pass frees the graph that it used.
        if torch.is_grad_enabled() and not self.differentiable:
            return self.bias.lower(geometry, dtype, device)
        key = (geometry.first_distance, geometry.n_distances, dtype, device)
        if self.last is None or self.last[0] != key:
            self.last = key, self.bias.lower(geometry, dtype, device)
        return self.last[1]
