"""Position schemes that are formulas of the distance."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..biases import DISTANCE_BIASES
from ..biases.distance import PositionBias
from ..nn import Positions, positions
from .prediction import predict

HEAD_DIM = 64  # of layers whose bias is created only to see what it is


class Formula(NamedTuple):
    """The bias and the window of an attention without content; None without them."""

    bias: PositionBias | None
    window: int | None


def formula_of(scheme: str | Positions, num_heads: int) -> Formula:
    """The formula of a position scheme, whose trainable parameters have their initial values.

    Raises ValueError for schemes that are no function of the distance alone.
    """
    found = positions(scheme)
    bias = found.bias and found.bias(num_heads, num_heads * HEAD_DIM)
    is_formula = getattr(bias, "of_distance", False)
    if found.embedding or found.rotary or (bias is not None and not is_formula):
        known = ", ".join(("none", "window(WIDTH)", *DISTANCE_BIASES))
        raise ValueError(f"{scheme} has no formula of the distance; these have one: {known}")
    return Formula(bias if is_formula else None, found.window)


def initial_formula(scheme: str, num_heads: int, seed: int) -> Formula | None:
    """The formula of a scheme before training with a seed, or None for schemes without one."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            return formula_of(scheme, num_heads)
        except ValueError:
            return None


def prediction(
    formula: Formula | None,
    layers: int,
    train_length: int,
    eval_length: int,
    cache: int | None = None,
) -> float | None:
    """That of `predict` with a sliding cache of so many keys, or None for schemes without a formula
    and biases that grow."""
    if formula is None:
        return None
    window = min((keys for keys in (formula.window, cache) if keys is not None), default=None)
    try:
        return predict(formula.bias, layers, train_length, eval_length, window=window)
    except ValueError:
        return None


def fields(formula: Formula, eps: float = 0.01) -> list[float]:
    """The receptive field of each head in one layer: the nearest keys that hold all but eps of the
    series of exp(b), and those of the window at most."""
    one = [math.inf] if formula.bias is None else formula.bias.receptive_field(eps).tolist()
    return one if formula.window is None else [min(keys, formula.window) for keys in one]
