"""Whether the series of a bias converges, where mathematics answers: for this package's biases.

Each function takes a bias to a sentence and a verdict, one for each head or one for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .. import biases
from ..biases.base import positive
from ..biases.sandwich import compression_ratios

Judged = tuple[str, Tensor | bool]


def of_bias(bias) -> Judged | None:
    """What is known of a bias, or None."""
    judge = CLOSED_FORMS.get(type(bias))
    if judge is None:
        return None
    reason, converges = judge(bias)
    return reason, torch.as_tensor(converges).reshape(-1).expand(bias.num_heads)


def _alibi(bias: biases.ALiBi) -> Judged:
    slopes = -bias.curve(torch.ones(1, dtype=torch.float64, device=bias.device))[:, 0]
    return "geometric: 1 / (1 - exp(-m)) where the slope m is positive", slopes > 0


def _kerple_log(bias: biases.KerpleLog) -> Judged:
    return "like d^-r1: converges where r1 > 1", positive(bias.r1) > 1


def _kerple_power(bias: biases.KerplePower) -> Judged:
    return "exp(-r1 d^r2) falls below every power of d", True


def _sandwich(bias: biases.Sandwich) -> Judged:
    return "cosines return: b never falls below -dbar / h, so terms do not vanish", False


def _smoothed_sandwich(bias: biases.SmoothedSandwich) -> Judged:
    h = compression_ratios(bias.num_heads)
    return "like d^(-6.6/h): converges where h < 6.6", 6.6 / h > 1


def _type1(bias: biases.Type1) -> Judged:
    return f"the sum of 1/n^2 is pi^2 / 6 = {math.pi**2 / 6:.4f}", True


def _type2(bias: biases.Type2) -> Judged:
    return "n^(-ln n) falls below every power of n", True


def _inverse_distance(bias: biases.InverseDistance) -> Judged:
    return "harmonic: the first N terms sum to more than ln(N + 1)", False


def _inverse_log_distance(bias: biases.InverseLogDistance) -> Judged:
    return "the first N terms sum to more than ln ln(N + 3) - ln ln 3", False


def _constant_far_away(bias: biases.T5 | biases.ClippedTable) -> Judged:
    return "one value for all far distances: terms do not vanish", False


CLOSED_FORMS: dict[type, Callable[..., Judged]] = {
    biases.ALiBi: _alibi,
    biases.KerpleLog: _kerple_log,
    biases.KerplePower: _kerple_power,
    biases.Sandwich: _sandwich,
    biases.SmoothedSandwich: _smoothed_sandwich,
    biases.Type1: _type1,
    biases.Type2: _type2,
    biases.InverseDistance: _inverse_distance,
    biases.InverseLogDistance: _inverse_log_distance,
    biases.T5: _constant_far_away,
    biases.ClippedTable: _constant_far_away,
}
