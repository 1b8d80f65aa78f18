"""Intervals of means over seeds. Importing it needs SciPy, an optional dependency."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scipy import optimize, stats

COVERAGE = 0.95
POWER = 0.8


class Interval(NamedTuple):
    """A mean, and its Student interval; of a single value, the interval is unbounded."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        mean, count = statistics.fmean(values), len(values)
        if count == 1:
            return cls(mean, -math.inf, math.inf)
        quantile = stats.t.ppf((1 + COVERAGE) / 2, count - 1)
        half = float(quantile) * statistics.stdev(values) / math.sqrt(count)
        return cls(mean, mean - half, mean + half)


def detectable(deviation: float, seeds: int) -> float:
    """The true mean of paired differences that a t-test finds, with its sign, with POWER.

    deviation: the standard deviation of the differences. The test has the level 1 - COVERAGE.
    """
    freedom = seeds - 1
    critical = stats.t.ppf((1 + COVERAGE) / 2, freedom)
    shift = optimize.brentq(
        lambda shift: stats.nct.sf(critical, freedom, shift) - POWER, 0, 3 * critical
    )
    return deviation * shift / math.sqrt(seeds)
