"""Fits the two free parameters of a GPU to some published timings, and predicts the others.

    fence       cycles of a fence, the latency that loops with warp-group products expose
    sustained   the fraction of the simulated speed that is reached

The error of an estimate is an upper bound of the errors of nine in ten predicted rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from biased_flash_attn.triton_kernels.configs import Config

from . import times
from .gpu import Gpu
from .kernels import Kernel, build
from .published import ROWS, TOKAMAX, Row
from .tiles import DELTA, DKV, DQ, FORWARD

AMPERE = 80
FENCES = range(0, 601, 50)
FRACTION = 0.9  # of predicted rows with at most the stated error


@dataclass(frozen=True)
class Prediction:
    """row: a timing, of these kernels or, in cuda/, of those in CUDA."""

    row: Row
    milliseconds: float

    @property
    def error(self) -> float:
        """The relative error, positive if the prediction is slower than the timing."""
        return self.milliseconds / self.row.milliseconds - 1


def predict(row: Row, gpu: Gpu) -> Prediction:
    return Prediction(row, min(_milliseconds(row, config, gpu) for config in row.configs))


def _milliseconds(row: Row, config: Config, gpu: Gpu) -> float:
    problem = times.Problem(row.batch, row.heads, row.n, row.head_dim, row.causal)
    longest_first = row.source != TOKAMAX
    names = (DELTA, DQ, DKV) if row.backward else (FORWARD,)
    arch = gpu.arch if row.is_alike else AMPERE
    kernels = (_stand_in(arch, name, row.head_dim, row.causal, config) for name in names)
    return sum(times.estimate(one, gpu, problem, longest_first).milliseconds for one in kernels)


@cache
def _stand_in(arch: int, name: str, head_dim: int, causal: bool, config: Config) -> Kernel:
    own = None if name == DELTA else config
    return build(arch, name, "none", head_dim, causal=causal, config=own)


def predictions(gpu: Gpu) -> list[Prediction]:
    return [predict(row, gpu) for row in ROWS if row.arch == gpu.arch]


def stated_error(found: Iterable[Prediction]) -> float:
    """An upper bound of the errors of nine in ten of the rows of alike kernels that were
    predicted."""
    alike = (one for one in found if one.row.is_alike)
    errors = sorted(abs(one.error) for one in alike if not one.row.is_fitted)
    return errors[math.ceil(FRACTION * len(errors)) - 1]


def fit(gpu: Gpu) -> list[tuple[Gpu, float]]:
    """For each number of cycles of a fence, the GPU with the best sustained fraction, and the
    standard deviation of the logarithmic errors of the fitted rows."""
    rows = [row for row in ROWS if row.arch == gpu.arch and row.is_fitted]
    found = []
    for fence in FENCES if gpu.arch == 90 else (0,):
        tried = replace(gpu, fence=fence, sustained=1.0)
        logs = [math.log1p(predict(row, tried).error) for row in rows]
        sustained = math.exp(statistics.mean(logs))
        found.append((replace(tried, sustained=sustained), statistics.pstdev(logs)))
    return found
