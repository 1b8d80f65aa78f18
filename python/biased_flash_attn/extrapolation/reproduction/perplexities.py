"""Tables of perplexities."""

from __future__ import annotations

from dataclasses import dataclass

from .. import published
from ..experiment import Settings, Size
from ..published import Row
from ..tables import COVERAGE
from .preset import SCALE, Preset, Printed, quotients, scaled, training

STEPS = 1000


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
        return (
            f"{self.paper}, table {self.table}, {self.dataset}: {first.layers} layers,"
            f" {first.heads} heads, trained at {first.train_length} tokens."
            f" {training(settings, results)} Quotients of perplexities at the paper's lengths: in"
            f" the paper, and here with {COVERAGE:.0%} intervals.\n\n"
            f"{quotients(printed, first.train_length, results, reference)}"
        )
