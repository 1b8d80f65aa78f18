"""Student intervals and the power of paired tests. Importing it needs SciPy, which is optional."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy import optimize, stats

from .tables import COVERAGE, Interval

POWER = 0.8


def student(values: Sequence[float]) -> Interval:
    """The mean of independent values and its Student interval; that of one value is unbounded."""
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Interval(mean, -math.inf, math.inf)
    quantile = stats.t.ppf((1 + COVERAGE) / 2, count - 1)
    half = float(quantile) * statistics.stdev(values) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half)


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
