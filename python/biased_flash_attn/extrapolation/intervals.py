"""Student intervals and the power of paired tests. Importing it needs SciPy, which is optional."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy import optimize, stats

from .tables import COVERAGE, Interval

POWER = 0.8


def student(values: Sequence[float]) -> Interval:
    """The mean of independent values and its Student interval, unbounded for a single value."""
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Interval(mean, -math.inf, math.inf)
    return around(mean, statistics.variance(values) / count, count - 1)


def extremes(values: Sequence[float]) -> Interval:
    """The mean of values between the least and the largest one, without bounds for one value.

    They describe values whose distribution is far from a normal one, and do not cover the truth as
    intervals do.
    """
    if len(values) == 1:
        return Interval(values[0], -math.inf, math.inf)
    return Interval(statistics.fmean(values), min(values), max(values))


def around(mean: float, variance: float, freedom: float) -> Interval:
    """The interval of a mean with an estimated variance, of so many degrees of freedom."""
    half = float(stats.t.ppf((1 + COVERAGE) / 2, freedom)) * math.sqrt(variance)
    return Interval(mean, mean - half, mean + half)


def deviation(values: Sequence[float]) -> Interval:
    """The standard deviation of two or more normal values, and its interval."""
    freedom, found = len(values) - 1, statistics.stdev(values)
    tail = (1 - COVERAGE) / 2
    low, high = (found * math.sqrt(freedom / stats.chi2.ppf(p, freedom)) for p in (1 - tail, tail))
    return Interval(found, float(low), float(high))


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
