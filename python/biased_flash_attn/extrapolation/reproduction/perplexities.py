"""Tables of perplexities."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import published
from ..agreement import rank_correlation
from ..experiment import Settings, Size
from ..experiment.report import brackets
from ..published import Row
from .preset import SCALE, SCALED, Preset, scaled, training
from .quotients import Printed, Quotient, as_table, quotients

STEPS = 1000
LEAST = 3  # rows of which the order is compared


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
        *_, last = columns.values()
        cache = f" With a sliding cache of {self.cache} tokens." if self.cache else ""
        return (
            f"{self.paper}, table {self.table}, {self.dataset}: {first.layers} layers,"
            f" {first.heads} heads, trained at {first.train_length} tokens.{cache}"
            f" {training(settings, results, reference)}{SCALED} Quotients of perplexities, at the"
            f" paper's lengths.{brackets(settings, reference)}"
            f"\n\n{as_table(printed, columns)}{order(printed, last)}"
        )


def order(printed: list[Printed], last: list[Quotient]) -> str:
    """The rank correlation of the last quotients with those of the paper, as a paragraph, or
    nothing for few rows. Of rows with the same numbers in the paper, the first one counts."""
    pairs: dict[tuple[tuple[int, float], ...], tuple[float, float]] = {}
    for row, (theirs, here) in zip(printed, last, strict=True):
        if theirs is not None and here is not None:
            pairs.setdefault(tuple(row.values.items()), (theirs, here.mean))
    if len(pairs) < LEAST:
        return ""
    theirs, ours = torch.tensor(list(pairs.values()), dtype=torch.float64).T
    return (
        f"\n\nRank correlation of the last quotients: {rank_correlation(theirs, ours):.2f}, of"
        f" {len(pairs)} schemes whose numbers in the paper differ (of equal ones, the first)."
    )
