"""Some heads of a bias, for tensor parallelism."""

from __future__ import annotations

import torch
from torch import Tensor

from ..forms import Distance, Form, Geometry
from .base import DistanceBias, PositionBias
from .cumulative import CumulativeBias


def of_heads(bias: PositionBias | CumulativeBias, start: int, stop: int):
    """The bias of the heads start, ..., stop - 1, as a bias of stop - start heads.

    Slopes and ratios are those that the heads have in the whole bias; a new bias of fewer heads
    would have different ones. The parameters are those of the whole bias and receive gradients from
    these heads only.

    bias: a bias of positions, or a `CumulativeBias`. Call a module such as `Cable` first.

    Raises TypeError for other arguments, and ValueError for an invalid range of heads.
    """
    if not isinstance(bias, (PositionBias, CumulativeBias)):
        raise TypeError(
            f"bias is a {type(bias).__name__}; it must be a bias of positions or a CumulativeBias"
        )
    if not 0 <= start < stop <= bias.num_heads:
        raise ValueError(
            f"start and stop are {start} and {stop}; they must be 0 <= start < stop <="
            f" {bias.num_heads}, the number of heads of the bias"
        )
    if isinstance(bias, CumulativeBias):
        gain = None if bias.gain is None else bias.gain[:, start:stop]
        return CumulativeBias(bias.steps[:, start:stop], gain, bias.kernel)
    make = DistanceHeads if isinstance(bias, DistanceBias) else PositionHeads
    return make(bias, start, stop)


class DistanceHeads(DistanceBias):
    """Some heads of a function of the distance."""

    def __init__(self, bias: DistanceBias, start: int, stop: int):
        super().__init__(stop - start)
        self.whole, self.heads = bias, slice(start, stop)
        self.fixed = bias.fixed

    def formula(self, d: Tensor) -> Tensor:
        logits = Distance(self.whole.logits(d)).of_heads(self.heads).table[0]
        return logits.expand(self.num_heads, -1)


class PositionHeads(PositionBias):
    """Some heads of a bias of positions with any form."""

    def __init__(self, bias: PositionBias, start: int, stop: int):
        super().__init__(stop - start)
        self.whole, self.heads = bias, slice(start, stop)
        self.fixed, self.of_distance = bias.fixed, bias.of_distance

    def lower(
        self, geometry: Geometry, dtype: torch.dtype, device: torch.device | str | None
    ) -> Form:
        return self.whole.lower(geometry, dtype, device).of_heads(self.heads)

    def curve(self, d: Tensor) -> Tensor:
        return self.whole.curve(d)[self.heads]

    def receptive_field(self, eps: float) -> Tensor:
        return self.whole.receptive_field(eps)[self.heads]
