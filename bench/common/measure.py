"""Measurement of time, memory and the peak of the processor."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench import ROOT

THREADS = 2


def alternate(benchmark, ours: Callable, other: Callable[[], float], rounds: int):
    """The seconds of `ours` in each round, and the results of other() just before it."""
    others = []

    def measure_other():
        others.append(other())

    benchmark.pedantic(ours, setup=measure_other, rounds=rounds, warmup_rounds=1)
    return benchmark.stats.stats.data, others[1:]


def in_turn(ours: Callable, other: Callable, device) -> tuple[list[float], list[float]]:
    """The seconds of both in each round on a `device.Gpu`, in fewer rounds for slow calls."""
    for call in 2 * (ours, other):
        device.seconds(call)  # warms up and allocates memory
    rounds, end = [], time.perf_counter() + device.seconds_per_comparison
    while len(rounds) < device.rounds and (
        len(rounds) < device.least_rounds or time.perf_counter() < end
    ):
        rounds.append((device.seconds(ours), device.seconds(other)))
    mine, others = zip(*rounds, strict=True)
    return list(mine), list(others)


def seconds(call: Callable) -> Callable[[], float]:
    """A function that returns the time of call()."""

    def timed() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return timed


def build_fma_peak(folder: Path) -> Callable[[], float]:
    """A function that measures the FLOP/s of fused multiply-adds on all threads."""
    program = folder / "fma_peak"
    flags = ["-O3", "-march=native", "-fopenmp", "-std=c++17"]
    subprocess.run(
        ["c++", *flags, Path(__file__).with_name("fma_peak.cpp"), "-o", program], check=True
    )

    def peak() -> float:
        command = [program, str(THREADS)]
        return 1e9 * float(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)

    return peak


def peak_memory(bias: str, dtype: str, length: int, direction: str) -> float:
    """The MiB of a pass beyond inputs, outputs and gradients: see bench.common.peak_memory."""
    return printed_by("bench.common.peak_memory", bias, dtype, str(length), direction)


def printed_by(module: str, *arguments: str) -> float:
    """The number that a module prints in a process of its own."""
    command = [sys.executable, "-m", module, *arguments]
    return float(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
