"""Some heads of a bias, for tensor parallelism."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..forms import Form, Geometry
from .base import DistanceBias, PositionBias
from .cumulative import CumulativeBias


def of_heads(bias: PositionBias | CumulativeBias, start: int, stop: int):
    """The bias of the heads from start to before stop, as a bias of stop - start heads.

    Slopes and ratios are those that the heads have in the whole bias; a new bias of fewer heads
    would have different ones. Parameters are those of the whole bias, with gradients from these
    heads.

    bias: a bias of positions, or a `CumulativeBias`; a module such as `Cable` is called first.

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
        return select_heads(self.whole.logits(d), self.heads)[0].expand(self.num_heads, -1)


class PositionHeads(PositionBias):
    """Some heads of a bias of positions with any form."""

    def __init__(self, bias: PositionBias, start: int, stop: int):
        super().__init__(stop - start)
        self.whole, self.heads = bias, slice(start, stop)
        self.fixed = bias.fixed

    def lower(
        self, geometry: Geometry, dtype: torch.dtype, device: torch.device | str | None
    ) -> Form:
        form = self.whole.lower(geometry, dtype, device)
        tensors = {name: x for name, x in vars(form).items() if isinstance(x, Tensor)}
        return replace(form, **{name: select_heads(x, self.heads) for name, x in tensors.items()})

    def curve(self, d: Tensor) -> Tensor:
        return self.whole.curve(d)[self.heads]


def select_heads(x: Tensor, heads: slice) -> Tensor:
    """Selects heads of x (1, H or 1, ...)."""
    return x if x.shape[1] == 1 else x[:, heads]
