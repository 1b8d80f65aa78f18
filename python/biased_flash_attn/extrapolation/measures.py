"""What tables, pictures and pages show of schemes: values at several contexts, with intervals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from .tables import Interval, shown, table

# Of Okabe and Ito (2008), without the yellow, which is faint on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":")

Curve = dict[int, Interval]  # by length of the context
Curves = dict[str, Curve]  # by scheme


@dataclass(frozen=True)
class Measure:
    """The curves of all schemes, and how they are drawn.

    limits: of the axis, which some curves may leave; by default those of the curves.
    marked: heights of horizontal lines.
    """

    name: str
    curves: Curves
    logarithmic: bool = False
    limits: tuple[float, float] | None = None
    marked: tuple[float, ...] = ()

    @property
    def floor(self) -> float:
        """Where a logarithmic axis ends at the latest, as intervals may reach 0 and below."""
        means = (x.mean for curve in self.curves.values() for x in curve.values())
        return min((mean for mean in means if mean > 0), default=0) / 2


def bounded(curve: Curve) -> bool:
    return all(math.isfinite(x.high - x.low) for x in curve.values())


def styles(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """A color and a dash for each name."""
    pairs = itertools.cycle(itertools.product(DASHES, COLORS))
    return {
        name: {"color": color, "linestyle": dash}
        for name, (dash, color) in zip(names, pairs, strict=False)
    }


def by_length(curves: Curves, lengths: Sequence[int]) -> str:
    """A table with a row for each scheme and a column for each length."""
    rows = [["scheme", *map(str, lengths)]]
    rows += [[name, *(shown(curve.get(n)) for n in lengths)] for name, curve in curves.items()]
    return table(rows)
