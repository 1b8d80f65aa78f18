"""Quotients of what a paper prints at several lengths, and of perplexities here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..experiment import Settings
from ..experiment.report import Reference, nats, perplexities
from ..experiment.uncertainty import Sample, perplexity
from ..tables import Interval, shown, table
from ..training import Results
from .preset import SCALE, scaled


@dataclass(frozen=True)
class Printed:
    """What a paper prints for one model.

    label: what the paper calls the scheme. scheme: its name in `nn.positions`.
    values: by length, without those of a dash.
    """

    label: str
    scheme: str
    values: dict[int, float]

    def quotient(self, length: int, other: int) -> float | None:
        both = length in self.values and other in self.values
        return self.values[length] / self.values[other] if both else None


def level(settings: Settings, results: Results, reference: Reference) -> str:
    """The perplexities at the training length, beside that of counts, as a sentence."""
    length, unit = settings.train_length, settings.size.unit
    curves = perplexities(settings, results, Sample(reference.blocks))
    found = [curve[length].mean for curve in curves.values()]
    ends = " to ".join(dict.fromkeys(f"{x:.3g}" for x in (min(found), max(found))))
    return (
        f" At {length} {unit} perplexities are {ends}, beside {reference.perplexity:.3g} of counts"
        f" that know {settings.prediction.context_of_counts(unit)}."
    )


class Quotient(NamedTuple):
    """Of what a paper prints, and of perplexities here; None for what either lacks."""

    printed: float | None
    here: Interval | None

    def __str__(self) -> str:
        if self.here is None:
            return "-"
        return f"{'-' if self.printed is None else f'{self.printed:.2f}'}, {shown(self.here)}"


def quotients(
    printed: Sequence[Printed], train_length: int, results: Results, reference: Reference
) -> dict[str, list[Quotient]]:
    """Quotients of all rows, by the name of a column.

    The first column has values at the shortest length that the paper prints, from that of training
    on, divided by that of the first row. The others have those at longer lengths divided by that at
    the shortest one, and before them, if this is longer than that of training, a quotient of both,
    which only models here have.
    """
    sample, first = Sample(reference.blocks), printed[0]
    base, *longer = sorted(n for n in first.values if n >= train_length)
    losses = [
        {n: nats(results[scaled(row.scheme)], n // SCALE) for n in (train_length, base, *longer)}
        for row in printed
    ]

    def here(losses: Tensor | None, reference: Tensor | None) -> Interval | None:
        if losses is None or reference is None:
            return None
        return perplexity(sample.interval(losses - reference))

    columns = {
        f"{base} / that of {first.label}": [
            Quotient(row.values[base] / first.values[base], here(found[base], losses[0][base]))
            for row, found in zip(printed, losses, strict=True)
        ]
    }
    pairs = [(base, train_length)] * (base > train_length) + [(length, base) for length in longer]
    for n, other in pairs:
        columns[f"{n} / {other}"] = [
            Quotient(row.quotient(n, other), here(found[n], found[other]))
            for row, found in zip(printed, losses, strict=True)
        ]
    return columns


def as_table(
    printed: Sequence[Printed], columns: dict[str, list[Quotient]], compared: str = ""
) -> str:
    """`compared` says in the header what is divided, if this differs in the paper and here."""
    header = [f"{name}: {compared}" if compared else name for name in columns]
    rows = [
        [row.label, scaled(row.scheme), *map(str, cells)]
        for row, *cells in zip(printed, *columns.values(), strict=True)
    ]
    return table([["paper", "here", *header], *rows])
