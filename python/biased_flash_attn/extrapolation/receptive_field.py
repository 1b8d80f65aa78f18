"""Theoretical receptive fields of biases: their order, their curves, and fits of their decay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..biases.distance import PositionBias
from ..biases.receptive_field import tail
from .convergence import check_position_bias


@dataclass(frozen=True, eq=False)
class FieldOrder:
    """Which of two biases has the smaller theoretical receptive field for small eps; H heads.

    Attributes:
        smaller: -1 for the first, 1 for the second, 0 where this is unknown, (H,) int64.
        distance: t_0 of the theorem's proof, from which on the terms keep their order, (H,)
            float64.
        eps: the order holds for every fraction below this one, (H,) float64.
    """

    smaller: Tensor
    distance: Tensor
    eps: Tensor


@torch.no_grad()
def compare_receptive_fields(first: PositionBias, second: PositionBias) -> FieldOrder:
    """Compares two biases by theorem 3.5 of Qin et al., 2023, head by head.

    If exp(b) / B, the fraction of one distance in the sum, is eventually smaller for the first
    bias, so are its theoretical receptive fields for small eps. The fractions are compared at
    distances up to 2^1000. A finite field is smaller than an infinite one; two infinite ones have
    no order.

    Raises TypeError for a bias that is not a function of the distance alone, and ValueError if the
    biases differ in their number of heads.
    """
    check_position_bias("first", first)
    check_position_bias("second", second)
    if first.num_heads != second.num_heads:
        raise ValueError(
            f"second has {second.num_heads} heads; it must have those of first, {first.num_heads}"
        )
    a, b = (tail(bias.curve, bias.device) for bias in (first, second))
    order, since = _eventual_order(a.log_fractions - b.log_fractions)
    # The proof's eps_0 is the fraction for which t_0 is the larger one of the two fields.
    tails = torch.where(order[:, None] < 0, b.log_tail_fractions, a.log_tail_fractions)
    eps = tails.gather(1, since[:, None])[:, 0].exp()

    both = a.is_finite & b.is_finite
    by_finiteness = b.is_finite.long() - a.is_finite.long()
    heads = first.num_heads
    return FieldOrder(
        smaller=torch.where(both, order, by_finiteness).expand(heads),
        distance=torch.where(both, a.distances[since], 0).expand(heads),
        eps=torch.where(both, eps, by_finiteness.abs()).expand(heads),
    )


def _eventual_order(difference: Tensor) -> tuple[Tensor, Tensor]:
    """The last nonzero sign of each row, and the index from which on it does not change.

    NaN, the difference of two infinities, has no sign.
    """
    sign = difference.nan_to_num(0).sign().long()
    index = torch.arange(sign.shape[1], device=sign.device)
    order = sign.gather(1, (sign.abs() * index).argmax(1, keepdim=True))
    since = torch.where(sign * order < 0, index + 1, 0).amax(1)
    return order[:, 0], since.clamp(max=len(index) - 1)


def normalized_receptive_field(weights: Tensor, points: int = 50) -> tuple[Tensor, Tensor]:
    """The curve of a receptive field as drawn by Qin et al. (2023, appendix E).

    Args:
        weights: (..., length), the weights of the distances from 0 on: exp(b(d)) for the
            theoretical receptive field, mean attention weights for the empirical one.
        points: the number of points of the curve.

    Returns:
        field (..., points), the fraction of the length that holds all but eps of the weight, and
        eps (points,), which decreases from 1 to 0.
    """
    length = weights.shape[-1]
    eps = torch.linspace(0, 1, points, dtype=torch.float64, device=weights.device).flip(0)
    sums = weights.double().cumsum(-1)
    before = torch.nn.functional.pad(sums[..., :-1], (1, 0))
    wanted = sums[..., -1:] * (1 - eps)
    field = torch.searchsorted(before.contiguous(), wanted.contiguous())
    return field.double() / length, eps


def mean_receptive_field(weights: Tensor, points: int = 50) -> tuple[Tensor, Tensor]:
    """The mean of the heads' curves of `normalized_receptive_field`, in which all count the same.

    weights: (heads, length), or with any other dimensions before the last. Returns field and eps,
    (points,) each.
    """
    field, eps = normalized_receptive_field(weights, points)
    return field.flatten(0, -2).mean(0), eps


@torch.no_grad()
def log_fit(bias: PositionBias, points: int) -> tuple[Tensor, Tensor]:
    """Slope and intercept of the least-squares fit of b(d) by slope log(1 + d) + intercept.

    The fit covers the nearest `points` distances; the results are two tensors (num_heads,) float64.
    Chi et al. fit Sandwich in this way ("Dissecting", 2023, section 6.2). At h = 8 and dbar = 128
    their -0.825 and -0.8 are the fit over all 8192 distances of their figure, with the frequencies
    of their code; over the nearest 50 distances, which they state, it is -1.02 and -0.02.
    """
    check_position_bias("bias", bias)
    if not isinstance(points, int) or points < 2:
        raise ValueError(f"points is {points!r}; it must be an int from 2 on")
    d = torch.arange(points, dtype=torch.float64, device=bias.device)
    basis = torch.stack([d.log1p(), torch.ones_like(d)], 1)
    fit = torch.linalg.lstsq(basis, bias.curve(d).mT).solution.expand(-1, bias.num_heads)
    return fit[0], fit[1]
