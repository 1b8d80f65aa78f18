"""Predictions from formulas against the perplexities that the papers publish."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby

import torch
from torch import Tensor

from .formulas import Formula, formula_of
from .prediction import predict
from .published import Row, rows

CHOICE, HELD_OUT, OTHER = "choice", "held out", "other"
RESAMPLES = 2000


@dataclass(frozen=True)
class Comparison:
    """What was predicted for one published row, and what was measured.

    Attributes:
        row: the published row.
        part: "choice" for the columns of Chi et al.'s tables 1 and 4 on which `predict` was chosen,
            the first, the third and so on; "held out" for their other columns; "other" for rows of
            other tables.
        lengths: the two lengths that are compared, the shortest from the training length on and the
            longest.
        loss: ln(perplexity at the longer / at the shorter length).
        predicted: by the name of a predictor.
    """

    row: Row
    part: str
    lengths: tuple[int, int]
    loss: float
    predicted: dict[str, float]


@dataclass(frozen=True)
class Agreement:
    """How well a predictor agrees with the losses of some comparisons.

    Attributes:
        schemes, rows: how many.
        rank: Spearman's correlation within a text, the mean of the texts.
        linear: Pearson's correlation likewise.
        rank_interval, linear_interval: of 95 %, by resampling schemes with all their texts.
        doubled: the fraction of pairs of a row whose perplexity more than doubles and one whose
            does not that the predictor puts in the right order; ties count one half.
    """

    schemes: int
    rows: int
    rank: float
    linear: float
    rank_interval: tuple[float, float]
    linear_interval: tuple[float, float]
    doubled: float


def _predicted(formula: Formula, layers: int, train_length: int, length: int, **options) -> float:
    bias, window = formula
    return predict(bias, layers, train_length, length, window=window, **options)


def _largest_field(formula: Formula, layers: int, train_length: int, length: int) -> float:
    """The papers' receptive field: that of the head with the largest one, through all layers."""
    return largest_field(formula, layers)


def largest_field(formula: Formula, layers: int, eps: float = 0.01) -> float:
    """The keys that reach a token through all layers, in the head with the most of them.

    In each layer these are the nearest that hold all but eps of the series of exp(b).
    """
    one = math.inf if formula.bias is None else formula.bias.receptive_field(eps).max().item()
    if formula.window is not None:
        one = min(one, formula.window)
    return layers * (one - 1) + 1


CHOSEN = "narrowest head"
PREDICTORS: dict[str, Callable[[Formula, int, int, int], float]] = {
    CHOSEN: partial(_predicted, heads="narrowest"),
    "separate heads": partial(_predicted, heads="separate"),
    "mixed heads": partial(_predicted, heads="mixed"),
    "narrowest head, no residual": partial(_predicted, heads="narrowest", residual=0),
    "separate heads, no residual": partial(_predicted, heads="separate", residual=0),
    "mixed heads, no residual": partial(_predicted, heads="mixed", residual=0),
    "largest receptive field": _largest_field,
}


def comparisons() -> list[Comparison]:
    """The published rows whose scheme is a formula without trained parameters.

    Those with a sliding cache of keys (Chi et al., table 5) are left out.
    """
    found = []
    for _, table in groupby(rows(), lambda row: (row.paper, row.table, row.dataset, row.model)):
        for place, row in enumerate(table):
            if has_fixed_formula(row) and "cache" not in row.protocol:
                found.append(_compared(row, place))
    return found


def by_model(found: Iterable[Comparison]) -> list[list[Comparison]]:
    """The comparisons of the same model on one or more texts, largest predictions first."""

    def model(comparison: Comparison) -> tuple:
        row = comparison.row
        settings = (row.label, row.model, row.layers, row.train_length, comparison.lengths)
        return row.paper, comparison.part, -comparison.predicted[CHOSEN], settings

    return [list(same) for _, same in groupby(sorted(found, key=model), model)]


def has_fixed_formula(row: Row) -> bool:
    """Whether a row's scheme is a function of the distance without trained parameters."""
    try:
        bias, _ = formula_of(row.scheme, row.heads)
    except ValueError:
        return False
    return bias is None or bias.fixed


def _compared(row: Row, place: int) -> Comparison:
    part = OTHER
    if row.paper.startswith("Chi") and row.table in ("1", "4"):
        part = HELD_OUT if place % 2 else CHOICE
    first = min(length for length in row.perplexity if length >= row.train_length)
    last = max(row.perplexity)
    loss = math.log(row.perplexity[last] / row.perplexity[first])
    predicted = _predictions(row.scheme, row.heads, row.layers, row.train_length, last)
    return Comparison(row, part, (first, last), loss, predicted)


@cache
def _predictions(
    scheme: str, heads: int, layers: int, train_length: int, length: int
) -> dict[str, float]:
    formula = formula_of(scheme, heads)
    return {
        name: predictor(formula, layers, train_length, length)
        for name, predictor in PREDICTORS.items()
    }


def agreement(found: Iterable[Comparison], predictor: str) -> Agreement:
    """How well a predictor agrees with losses of the same schemes on one or more texts."""
    found = list(found)
    schemes = list(dict.fromkeys(x.row.label for x in found))
    texts = list(dict.fromkeys(x.row.dataset for x in found))
    cells = {(x.row.dataset, x.row.label): x for x in found}
    table = [[cells[text, scheme] for scheme in schemes] for text in texts]
    predicted, losses = (
        torch.tensor([[value(x) for x in text] for text in table], dtype=torch.float64)
        for value in (lambda x: x.predicted[predictor], lambda x: x.loss)
    )
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(schemes), (RESAMPLES, 1, len(schemes)), generator=generator)
    drawn = drawn.expand(-1, len(texts), -1)
    resampled = [
        values.expand(RESAMPLES, -1, -1).gather(2, drawn) for values in (predicted, losses)
    ]
    doubled = losses > math.log(2)
    pairs = predicted[doubled][:, None] - predicted[~doubled]
    pairs = pairs.nan_to_num(0)  # of two infinite fields
    return Agreement(
        len(schemes),
        len(found),
        rank_correlation(predicted, losses).mean().item(),
        correlation(predicted, losses).mean().item(),
        _interval(rank_correlation(*resampled)),
        _interval(correlation(*resampled)),
        ((pairs > 0) + (pairs == 0).double() / 2).mean().item(),
    )


def _interval(resampled: Tensor) -> tuple[float, float]:
    """95 % of the means of the texts. A resample of schemes that are all equal has none."""
    quantiles = torch.tensor([0.025, 0.975], dtype=torch.float64)
    return tuple(resampled.mean(1).nanquantile(quantiles).tolist())


def rank_correlation(x: Tensor, y: Tensor) -> Tensor:
    """Spearman's correlation over the last dimension; ties have the mean of their ranks."""
    return correlation(_ranks(x), _ranks(y))


def correlation(x: Tensor, y: Tensor) -> Tensor:
    """Pearson's correlation over the last dimension, NaN for constant or infinite values."""
    x, y = (z - z.mean(-1, keepdim=True) for z in (x, y))
    return (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))


def _ranks(x: Tensor) -> Tensor:
    smaller = (x[..., None] > x[..., None, :]).sum(-1)
    return (smaller + (x[..., None] >= x[..., None, :]).sum(-1) - 1).double() / 2
