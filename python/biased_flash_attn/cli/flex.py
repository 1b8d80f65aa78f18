"""A bias as FlexAttention's score_mod, from the form that the bias is lowered to.

FlexAttention gets the same numbers as our kernels, computed by the same formulas, so that it is as
fast as possible: one lookup per pair for any function of the distance, and one for each product of
vectors, as those of all distances are multiplied before the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..forms import Form, NoBias


def captured(form: Form | None) -> tuple[str, tuple[Tensor | None, ...]]:
    """The name of a form, and the tensors that its score_mod reads.

    Raises NotImplementedError for a form without a score_mod.
    """
    form = NoBias() if form is None else form
    if form.name not in TRANSLATIONS:
        raise NotImplementedError(f"the form {form.name!r} has no score_mod")
    return form.name, TRANSLATIONS[form.name].captured(form)


def score_mod(form: str, *numbers: Tensor | None) -> Callable | None:
    """The bias of a causal call."""
    return TRANSLATIONS[form].score_mod(*numbers)


def linear(slopes: Tensor) -> Callable:
    return lambda score, b, h, i, j: score - slopes[h] * (i - j)


def distance(table: Tensor) -> Callable:
    # Masked pairs must not index outside of the table either.
    return lambda score, b, h, i, j: score + table[h, (i - j).abs()]


def cumulative(*numbers: Tensor | None) -> Callable:
    beta = sums(*numbers)
    return lambda score, b, h, i, j: score + beta(b, h, i, j)


def log1p_square(*numbers: Tensor | None) -> Callable:
    beta = sums(*numbers)
    return lambda score, b, h, i, j: score - torch.log1p(beta(b, h, i, j) ** 2)


def sums(query_sums: Tensor, key_sums: Tensor, gain: Tensor | None) -> Callable:
    """beta of a cumulative bias."""
    if gain is None:
        return lambda b, h, i, j: query_sums[b, h, i] - key_sums[b, h, j]
    return lambda b, h, i, j: gain[b, h, i] * (query_sums[b, h, i] - key_sums[b, h, j])


def normalized(
    table: Tensor, gain: Tensor, knots: Tensor, slopes: Tensor, intercepts: Tensor
) -> Callable:
    """With a table and gains that all heads share, as those of FIRE are."""

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        x = gain[0, i] * table[0, (i - j).abs()]
        piece = sum((x >= knots[0, n]).int() for n in range(knots.shape[1]))
        return score + intercepts[h, piece] + slopes[h, piece] * x

    return modify


def relative_last(per_query: Tensor | None, per_key: Tensor | None) -> Callable:
    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        for x, row in ((per_query, i), (per_key, j)):
            if x is not None:
                score = score + x[b, h, row, (i - j).clamp(0, x.shape[-1] - 1)]
        return score

    return modify


def relative(*products: Tensor | None) -> Callable:
    nearest = relative_last(*products)
    extent = next(x.shape[-1] for x in products if x is not None)
    return lambda score, b, h, i, j: torch.where(i - j < extent, nearest(score, b, h, i, j), score)


def products(form: Form) -> list[Tensor | None]:
    """The bias of each query, or key, and distance of a table, (B, H, rows, n)."""
    u, p, w, q = form.tensors
    return [x @ table if x.shape[-1] else None for x, table in ((u, p), (w, q))]


def prefix_sums(form: Form) -> tuple[Tensor | None, ...]:
    return form.sums.float(), form.sums.float(), form.gain


@dataclass(frozen=True)
class Translation:
    """captured: the tensors of a form that the score_mod reads. score_mod: makes it from them."""

    captured: Callable[[Form], list[Tensor | None] | tuple[Tensor | None, ...]]
    score_mod: Callable[..., Callable | None]


def copies(form: Form) -> list[Tensor]:
    """The tensors of the first batch entry.

    Copies, as views lose their gradients in compiled calls (torch 2.13), and so does a tensor that
    is read at two places.
    """
    return [x[0].clone() for x in form.tensors]


TRANSLATIONS = {
    "none": Translation(copies, lambda: None),
    "linear": Translation(copies, linear),
    "distance": Translation(copies, distance),
    "cumulative": Translation(prefix_sums, cumulative),
    "log1p_square": Translation(prefix_sums, log1p_square),
    "normalized": Translation(copies, normalized),
    "relative": Translation(products, relative),
    "relative_last": Translation(products, relative_last),
}
