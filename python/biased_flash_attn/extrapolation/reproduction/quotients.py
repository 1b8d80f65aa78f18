"""Quotients of what a paper prints at several lengths, and of perplexities here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..experiment.report import Reference, nats, ratio
from ..experiment.uncertainty import Sample
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


class Quotient(NamedTuple):
    """Of what a paper prints, and of perplexities here; None for what either lacks."""

    printed: float | None
    here: Interval | None


def divided(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value / other


def quotients(
    printed: Sequence[Printed], train_length: int, results: Results, reference: Reference
) -> dict[str, list[Quotient]]:
    """Quotients of all rows, by the name of a column.

    The first column has perplexities here at the length of training, divided by that of counts.
    The second has values at the shortest length that the paper prints, from that of training on,
    divided by that of the first row. The others have those at longer lengths divided by that at
    the shortest one, and before them, if this is longer than that of training, a quotient of both,
    which only models here have.
    """
    sample, first = Sample(reference.blocks), printed[0]
    base, *longer = sorted({n for row in printed for n in row.values if n >= train_length})
    losses = [
        {n: nats(results[scaled(row.scheme)], n // SCALE) for n in (train_length, base, *longer)}
        for row in printed
    ]
    counts = torch.tensor([reference.counts], dtype=torch.float64)

    columns = {
        f"{train_length} / counts": [
            Quotient(None, ratio(sample, found[train_length], counts)) for found in losses
        ],
        f"{base} / that of {first.label}": [
            Quotient(
                divided(row.values.get(base), first.values.get(base)),
                ratio(sample, found[base], losses[0][base]),
            )
            for row, found in zip(printed, losses, strict=True)
        ],
    }
    pairs = [(base, train_length)] * (base > train_length) + [(length, base) for length in longer]
    for n, other in pairs:
        columns[f"{n} / {other}"] = [
            Quotient(
                divided(row.values.get(n), row.values.get(other)),
                ratio(sample, found[n], found[other]),
            )
            for row, found in zip(printed, losses, strict=True)
        ]
    return columns


def as_table(
    printed: Sequence[Printed],
    columns: dict[str, list[Quotient]],
    paper: str = "paper",
    here: str = "here",
) -> str:
    """Two rows for each scheme, which begin with the given words."""
    rows = [["scheme", *columns]]
    for row, *cells in zip(printed, *columns.values(), strict=True):
        theirs = ("-" if cell.printed is None else f"{cell.printed:.2f}" for cell in cells)
        rows.append([f"{paper}: {row.label}", *theirs])
        rows.append([f"{here}: {scaled(row.scheme)}", *(shown(cell.here) for cell in cells)])
    return table(rows)
