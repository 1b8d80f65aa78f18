"""Fits the sustained fraction of the simulated speed to some timings, and predicts the others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import replace

from .. import calibration
from ..calibration import Prediction
from ..gpu import H100, Gpu
from . import times
from .kernels import ALL, DKV, DQ, FORWARD, build
from .published import FLASH, ROWS, Row

# Matrix units that are busy for most of the time lower the clock, and the simulation omits
# instruction fetch, register banks and conflicts in the L2 cache.
GPU = replace(H100, sustained=0.737)


def predict(row: Row, gpu: Gpu) -> Prediction:
    problem, names = row.problem, (FORWARD,)
    if row.backward:
        names = (ALL,) if row.source == FLASH else (DQ, DKV)
    found = 0.0
    for name in names:
        kernel = build(name, "None", problem.head_dim)
        # None of these kernels adds in a fixed order.
        found += times.milliseconds(kernel, gpu, problem, in_turn=False)
        found += times.milliseconds_around(name, gpu, problem)
    return Prediction(row, found)


def predictions(gpu: Gpu = GPU) -> list[Prediction]:
    return [predict(row, gpu) for row in ROWS]


def stated_error(found: Iterable[Prediction]) -> float:
    """That of rows of kernels like ours."""
    return calibration.stated_error(found)


def fitted_fraction() -> float:
    whole = replace(GPU, sustained=1.0)
    errors = (predict(row, whole).error for row in ROWS if row.is_fitted)
    return math.exp(statistics.mean(map(math.log1p, errors)))
