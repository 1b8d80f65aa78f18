"""Some heads of a bias, for tensor parallelism."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..forms import Distance, Form, Geometry
from .cumulative import CumulativeBias
from .distance import DistanceBias, PositionBias
from .relative import RelativeBias


def of_heads(bias: PositionBias | CumulativeBias | RelativeBias, start: int, stop: int):
    """The bias of the heads start, ..., stop - 1, as a bias of stop - start heads.

    Slopes and ratios are those that the heads have in the whole bias; a new bias of fewer heads
    would have different ones. The parameters are those of the whole bias and receive gradients from
    these heads only.

    bias: a bias of positions, a `CumulativeBias` or a `RelativeBias`. Call a module such as `Cable`
        first.

    Raises TypeError for other arguments, and ValueError for an invalid range of heads.
    """
    if not isinstance(bias, (PositionBias, CumulativeBias, RelativeBias)):
        raise TypeError(
            f"bias is a {type(bias).__name__}; it must be a bias of positions, a CumulativeBias or"
            " a RelativeBias"
        )
    if not 0 <= start < stop <= bias.num_heads:
        raise ValueError(
            f"start and stop are {start} and {stop}; they must be 0 <= start < stop <="
            f" {bias.num_heads}, the number of heads of the bias"
        )
    if isinstance(bias, CumulativeBias):
        gain = None if bias.gain is None else bias.gain[:, start:stop]
        return CumulativeBias(bias.steps[:, start:stop], gain, bias.kernel)
    if isinstance(bias, RelativeBias):
        return _relative_heads(bias, slice(start, stop))
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


def _relative_heads(bias: RelativeBias, heads: slice) -> RelativeBias:
    def of_factors(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[1] == 1 else x[:, heads]

    def of_tables(table):
        if table is None:
            return None
        if not isinstance(table, Tensor):
            return lambda d: of_tables(table(d))
        return table if len(table) == 1 else table[heads]

    return replace(
        bias,
        query_factors=of_factors(bias.query_factors),
        query_tables=of_tables(bias.query_tables),
        key_factors=of_factors(bias.key_factors),
        key_tables=of_tables(bias.key_tables),
    )
