"""The latest run of `make bench` whose results are kept."""

from __future__ import annotations

import json
import statistics
from functools import cache
from pathlib import Path

from bench import RESULTS
from bench.reports.results import Row, rows_of

MODELS, SCHEMES = "-models", "-schemes"


@cache
def path(suffix: str = "") -> Path:
    """Its JSON file: that of the kernels or, with the suffix MODELS or SCHEMES, that of these."""
    paths = RESULTS.glob(f"*/????-??-??-????{suffix}.json")
    on_cpus = (path for path in paths if "gpu" not in json.loads(path.read_text())["machine"])
    return max(on_cpus, key=lambda path: path.stem)


def row(work: str, dtype: str) -> Row:
    return rows()[work, dtype]


def seconds(work: str, dtype: str = "float32") -> tuple[float, float]:
    """The medians of both sides, ours first."""
    found = row(work, dtype)
    return statistics.median(found.ours), statistics.median(found.other)


@cache
def rows(suffix: str = "") -> dict[tuple[str, str], Row]:
    """By work and dtype."""
    return {(x.work, x.dtype): x for x in rows_of(json.loads(path(suffix).read_text()))}
