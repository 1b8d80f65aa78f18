"""Tables of perplexities."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import published
from ..agreement import DECIMALS, rank_correlation
from ..experiment import Settings, Size
from ..experiment.report import brackets, predicted
from ..intervals import extremes
from ..published import Row
from .preset import SCALE, SCALED, Preset, scaled, training
from .quotients import Printed, Quotient, as_table, quotients

STEPS = 1000
LEAST = 5  # rows of which the order is compared


@dataclass(frozen=True)
class PerplexityTable(Preset):
    """A table of a paper: the rows of a text and of models with so many layers.

    cache: the number of keys that evaluation keeps, if it has a sliding cache.
    """

    paper: str
    table: str
    dataset: str
    layers: int
    cache: int | None = None

    def rows(self) -> list[Row]:
        wanted = self.paper, self.table, self.dataset, self.layers
        return [r for r in published.rows() if (r.paper, r.table, r.dataset, r.layers) == wanted]

    def experiments(self, seeds, steps=None):
        # As many layers as in the paper, so that windows reach as far through all of them,
        # relative to the training length.
        steps = steps or STEPS
        size = Size(self.layers, 64, 4, steps, 64, 2e-3, blocks=2048, gradients=16, scored=4)
        by_length: dict[int, list[Row]] = {}
        for row in self.rows():
            by_length.setdefault(row.train_length, []).append(row)
        found = []
        for train_length, rows in by_length.items():
            schemes = tuple(scaled(row.scheme) for row in rows)
            lengths = {train_length, *(length for row in rows for length in row.perplexity)}
            eval_lengths = tuple(sorted(length // SCALE for length in lengths))
            cache = self.cache and self.cache // SCALE
            found.append(
                Settings(schemes, train_length // SCALE, eval_lengths, size, seeds, cache=cache)
            )
        return found

    def beside(self, settings, results, reference):
        rows = [row for row in self.rows() if row.train_length // SCALE == settings.train_length]
        printed = [Printed(row.label, row.scheme, row.perplexity) for row in rows]
        first = rows[0]
        columns = quotients(printed, first.train_length, results, reference)
        *_, (name, last) = columns.items()
        predictions = [predicted(settings, scaled(row.scheme)) for row in printed]
        columns["predicted"] = [
            Quotient(None, None if fraction is None else extremes([fraction]))
            for fraction in predictions
        ]
        cache = f" With a sliding cache of {self.cache} tokens." if self.cache else ""
        return (
            f"{self.paper}, table {self.table}, {self.dataset}: {first.layers} layers,"
            f" {first.heads} heads, trained at {first.train_length} tokens.{cache}"
            f" {training(settings, results, reference)}{SCALED} Quotients of perplexities, at the"
            f" paper's lengths.{brackets(settings, reference)} Predicted is the fraction of"
            f" the information at {settings.eval_lengths[-1]} {settings.size.unit} from beyond"
            f" {settings.train_length}, before training."
            f"\n\n{as_table(printed, columns)}{agreement(name, printed, last, predictions)}"
        )


def agreement(
    name: str, printed: list[Printed], last: list[Quotient], predictions: list[float | None]
) -> str:
    """Rank correlations of the last quotients, whose column has a name, a paragraph each, without
    those of few rows. Of rows with the same numbers in the paper, the first one counts."""
    with_paper: dict[tuple[tuple[int, float], ...], tuple[float, float]] = {}
    with_predictions: list[tuple[float, float]] = []
    for row, (theirs, here), fraction in zip(printed, last, predictions, strict=True):
        if here is not None and theirs is not None:
            with_paper.setdefault(tuple(row.values.items()), (theirs, here.mean))
        if here is not None and fraction is not None:
            with_predictions.append((round(fraction, DECIMALS), here.mean))
    differing = " whose numbers in the paper differ (of equal ones, the first)"
    paper = _correlation(f"{name} here and in the paper", [*with_paper.values()], differing)
    return paper + _correlation(f"{name} here and what `predict` says", with_predictions)


def _correlation(of: str, pairs: list[tuple[float, float]], which: str = "") -> str:
    if len(pairs) < LEAST:
        return ""
    x, y = torch.tensor(pairs, dtype=torch.float64).T
    correlation = f"{rank_correlation(x, y):.2f}, of {len(pairs)} schemes{which}"
    return f"\n\nRank correlation of {of}: {correlation}."
