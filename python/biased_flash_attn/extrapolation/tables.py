"""Tables in Markdown, and records as JSON."""

from __future__ import annotations

import json
import math
import re
from typing import NamedTuple

COVERAGE = 0.95


class Interval(NamedTuple):
    """An estimate and its interval, which is meant to cover the truth in COVERAGE of experiments.

    It is unbounded where nothing tells how much the estimate varies.
    """

    mean: float
    low: float
    high: float


def as_json(record: object) -> str:
    """The record as indented JSON, with each list of numbers on one line."""
    text = json.dumps(record, indent=1)
    return re.sub(r"\[[^\[\]{}\"]*\]", lambda found: " ".join(found[0].split()), text) + "\n"


def table(rows: list[list[str]]) -> str:
    """A Markdown table: the first row is the header, and numbers are aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(cells: list[str]) -> str:
        first, *rest = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return "| " + " | ".join([first.strip().ljust(widths[0]), *rest]) + " |"

    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return "\n".join([line(rows[0]), f"|{rule}|", *map(line, rows[1:])])


def shown(interval: Interval | None, digits: int = 3) -> str:
    """The cell of a table: the mean with its interval if there is one, or a dash."""
    if interval is None:
        return "-"
    mean, low, high = (f"{x:.{digits}f}" for x in interval)
    return f"{mean} [{low}, {high}]" if math.isfinite(interval.high - interval.low) else mean
