"""A bias as FlexAttention's score_mod.

FlexAttention gets the same numbers as our kernels, computed by the same formulas, so that it is as
fast as possible: one lookup per pair for any function of the distance.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..forms import Distance, Linear


def captured(form) -> tuple[str, tuple[Tensor, ...]]:
    """The name of a form, and the tensors that its score_mod reads."""
    # Copies: views lose their gradients in compiled calls (torch 2.13), and so does a tensor that
    # is read at two places.
    if form is None:
        return "none", ()
    if isinstance(form, Linear):
        return form.name, (form.slopes[0].clone(),)
    if isinstance(form, Distance):
        return form.name, (form.table[0].clone(),)
    gain = () if form.gain is None else (form.gain,)
    return form.name, (form.sums.float(), form.sums.float(), *gain)


def score_mod(form: str, *numbers: Tensor) -> Callable | None:
    """The bias of a causal call."""
    if form == "linear":
        (slopes,) = numbers
        return lambda score, b, h, i, j: score - slopes[h] * (i - j)
    if form == "distance":
        (table,) = numbers
        # Masked pairs must not index outside of the table either.
        return lambda score, b, h, i, j: score + table[h, (i - j).abs()]
    if form in ("cumulative", "log1p_square"):
        beta = sums_mod(*numbers)
        if form == "cumulative":
            return lambda score, b, h, i, j: score + beta(b, h, i, j)
        return lambda score, b, h, i, j: score - torch.log1p(beta(b, h, i, j) ** 2)
    return None


def sums_mod(of_query: Tensor, of_key: Tensor, gain: Tensor | None = None) -> Callable:
    """beta of a cumulative bias."""
    if gain is None:
        return lambda b, h, i, j: of_query[b, h, i] - of_key[b, h, j]
    return lambda b, h, i, j: gain[b, h, i] * (of_query[b, h, i] - of_key[b, h, j])
