"""Whether the series of a bias converges, in closed form for this package's biases.

Each function maps a bias to a sentence and a verdict, one per head or one for all heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .. import biases
from ..biases.parameters import positive
from ..biases.sandwich import compression_ratios
from ..biases.series import SeriesBias
from ..biases.slopes import slope_values

Verdict = tuple[str, Tensor | bool]


def verdict(bias) -> Verdict | None:
    """The reason and the verdict for a bias, or None if there is no closed form."""
    decide = CLOSED_FORMS.get(type(bias))
    if decide is None:
        return None
    reason, converges = decide(bias)
    return reason, torch.as_tensor(converges).reshape(-1).expand(bias.num_heads)


def _alibi(bias: biases.ALiBi) -> Verdict:
    slopes = -bias.curve(torch.ones(1, dtype=torch.float64, device=bias.device))[:, 0]
    return "geometric: 1 / (1 - exp(-m)) where the slope m is positive", slopes > 0


def _kerple_log(bias: biases.KerpleLog) -> Verdict:
    return "like d^-r1: converges where r1 > 1", positive(bias.r1) > 1


def _kerple_power(bias: biases.KerplePower) -> Verdict:
    return "exp(-r1 d^r2) falls below every power of d", True


def _sandwich(bias: biases.Sandwich) -> Verdict:
    return "cosines oscillate: b never falls below -dbar / h, so terms do not vanish", False


def _smoothed_sandwich(bias: biases.SmoothedSandwich) -> Verdict:
    h = compression_ratios(bias.num_heads)
    return "like d^(-6.6/h): converges where h < 6.6", 6.6 / h > 1


def _type1(bias: biases.Type1) -> Verdict:
    if bias.slopes is not None:
        return "like (k d)^-2 where the slope k is positive", _slopes(bias) > 0
    return f"the sum of 1/n^2 is pi^2 / 6 = {math.pi**2 / 6:.4f}", True


def _type2(bias: biases.Type2) -> Verdict:
    if bias.slopes is not None:
        return "falls below every power of d where the slope k is positive", _slopes(bias) > 0
    return "n^(-ln n) falls below every power of n", True


def _slopes(bias: SeriesBias) -> Tensor:
    return slope_values(bias.slopes, bias.num_heads, None)


def _inverse_distance(bias: biases.InverseDistance) -> Verdict:
    if bias.slopes is not None:
        return "harmonic, scaled: terms of at least 1 / (1 + k d)", False
    return "harmonic: the first N terms sum to more than ln(N + 1)", False


def _inverse_log_distance(bias: biases.InverseLogDistance) -> Verdict:
    if bias.slopes is not None:
        return "terms of 1 / (n ln n) with n = k d + 3", False
    return "the first N terms sum to more than ln ln(N + 3) - ln ln 3", False


def _constant_at_large_distances(bias: biases.T5 | biases.ClippedTable) -> Verdict:
    return "one value for all far distances: terms do not vanish", False


CLOSED_FORMS: dict[type, Callable[..., Verdict]] = {
    biases.ALiBi: _alibi,
    biases.KerpleLog: _kerple_log,
    biases.KerplePower: _kerple_power,
    biases.Sandwich: _sandwich,
    biases.SmoothedSandwich: _smoothed_sandwich,
    biases.Type1: _type1,
    biases.Type2: _type2,
    biases.InverseDistance: _inverse_distance,
    biases.InverseLogDistance: _inverse_log_distance,
    biases.T5: _constant_at_large_distances,
    biases.ClippedTable: _constant_at_large_distances,
}
