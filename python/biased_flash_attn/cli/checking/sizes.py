"""How much of `check` fits into its time on this device."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from . import oracle
from .problems import CALLS, DTYPES, FORMS, draw

SECONDS = 105.0  # of the whole command, after imports
# Of it, when the last row and the last FlexAttention may begin. On a GPU rows take longer, as their
# kernels have to be compiled, and timing is quick.
LAST_ROW = {"cpu": 0.55, "cuda": 0.7}
LAST_PEER = {"cpu": 0.65, "cuda": 0.7}
ORACLE_SECONDS = 40.0  # for float64 and naive attention, over all rows
GIBIBYTES_A_PROCESS = 3
MOST_PROCESSES = 16
# Calls have wider heads, no mask, or more tokens than the one that is measured, and ours run too.
DEARER = 1.5
# Lengths that are tried for the results.
LENGTHS = {"cpu": (2048, 1024, 512), "cuda": (4096, 2048, 1024)}


@dataclass(frozen=True)
class Timed:
    """What is timed."""

    length: int
    dtype: str
    head_dim: int


def timed(device: str) -> Timed:
    if device == "cpu":
        return Timed(2048, "float32", 64)
    # Dense biases take a quarter of the memory at half the length.
    length = 8192 if room() >= len(FORMS) else 4096
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    return Timed(length, "bfloat16" if native else "float16", 128)


def fitting_length(device: str, seed: int) -> int:
    """The longest length at which the oracle of all rows is expected to take ORACLE_SECONDS."""
    lengths = LENGTHS[device]
    seconds_of_oracle(device, lengths[-1] // 2, seed)  # warms up
    measured = seconds_of_oracle(device, lengths[-1], seed)
    for length in lengths:
        expected = measured * (length / lengths[-1]) ** 2 * len(FORMS) * len(CALLS) * DEARER
        if expected <= ORACLE_SECONDS:
            return length
    return lengths[-1]


def seconds_of_oracle(device: str, length: int, seed: int) -> float:
    """What is computed to judge one form in one kind of call, in every dtype."""
    start = time.perf_counter()
    for name in ("float32", "float16"):
        problem = draw("linear", CALLS[0], length, DTYPES[name], seed, device)
        oracle.results(problem)
        for dtype in DTYPES.values():
            if dtype.itemsize == DTYPES[name].itemsize:
                oracle.results(problem.to(dtype))
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def processes(device: str) -> int:
    """How many processes check side by side: as many as have a core to compile on and memory."""
    if device == "cpu":
        return 1
    return max(1, min(MOST_PROCESSES, os.cpu_count() or 1, room()))


def room() -> int:
    """How many processes the memory of the GPU holds."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return free // (GIBIBYTES_A_PROCESS * 2**30)
