"""The sizes of the problems of `check`, chosen for its time limit on this device."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from . import oracle
from .forms import EXAMPLE, FORMS, TIMED
from .problems import CALLS, DTYPES, draw

MINUTES = 2.0  # for which the sizes are chosen
SECONDS_PER_MINUTE = 52.5  # of the command's minutes; the rest is for imports and the report
# The fraction of the time after which no row, or no FlexAttention, is started. On a GPU rows take
# longer, because kernels have to be compiled, and timing is fast.
LAST_ROW = {"cpu": 0.6, "cuda": 0.7}
LAST_PEER = {"cpu": 0.65, "cuda": 0.7}
ORACLE_SECONDS = 40.0  # for float64 and naive attention, over all rows
GIBIBYTES_PER_PROCESS = 3
MAX_PROCESSES = 24
# Other forms and calls take longer than the measured one, and our kernels are run besides.
COST_FACTOR = 1.9
# Candidate lengths for the results.
LENGTHS = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096)}


@dataclass(frozen=True)
class Timed:
    """The problem that is timed."""

    length: int
    dtype: str
    head_dim: int


def timed(device: str) -> Timed:
    if device == "cpu":
        return Timed(1024, "float32", 64)
    # At half the length, dense biases take a quarter of the memory.
    length = 8192 if max_gpu_processes() >= len(TIMED) else 4096
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    return Timed(length, "bfloat16" if native else "float16", 128)


def fitting_length(device: str, seed: int) -> int:
    """The longest length at which the oracle of all rows is expected to take ORACLE_SECONDS."""
    lengths = LENGTHS[device]
    oracle_seconds(device, lengths[0] // 2, seed)  # warms up
    fitting, expected = lengths[0], 0.0
    for length in lengths:
        # Twice as many tokens take at least twice as long.
        if 2 * expected > ORACLE_SECONDS:
            break
        rows = len(FORMS) * len(CALLS) * COST_FACTOR
        expected = rows * oracle_seconds(device, length, seed)
        if expected <= ORACLE_SECONDS:
            fitting = length
    return fitting


def oracle_seconds(device: str, length: int, seed: int) -> float:
    """The time of the oracle for one form in one kind of call, in every dtype."""
    start = time.perf_counter()
    for name in ("float32", "float16"):
        problem = draw(EXAMPLE, CALLS[0], length, DTYPES[name], seed, device)
        oracle.results(problem)
        for dtype in DTYPES.values():
            if dtype.itemsize == DTYPES[name].itemsize:
                oracle.results(problem.to(dtype))
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def processes(device: str) -> int:
    """The number of parallel processes, limited by cores and GPU memory."""
    if device == "cpu":
        return 1
    return max(1, min(MAX_PROCESSES, os.cpu_count() or 1, max_gpu_processes()))


def max_gpu_processes() -> int:
    """The number of processes that fit into the memory of the GPU."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return free // (GIBIBYTES_PER_PROCESS * 2**30)
