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
from .kernels import DKV, DQ, FORWARD, build
from .published import ROWS, Row

# Matrix units that are busy for most of the time lower the clock, and the simulation omits
# instruction fetch, register banks and conflicts in the L2 cache.
GPU = replace(H100, sustained=0.735)


def predict(row: Row, gpu: Gpu) -> Prediction:
    problem = row.problem
    names = (DQ, DKV) if row.backward else (FORWARD,)
    kernels = (build(name, "None", problem.head_dim) for name in names)
    found = sum(times.milliseconds(one, gpu, problem) for one in kernels)
    if row.backward:
        found += times.milliseconds_of_delta(gpu, problem)
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
