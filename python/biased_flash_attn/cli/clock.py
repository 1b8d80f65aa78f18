"""Timing of calls on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 256 * 2**20  # several times the cache
HEAD_START_CYCLES = 10_000_000  # about 5 ms


class CpuClock:
    """Times synchronous calls."""

    def seconds(self, call: Callable) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def release(self) -> None:
        """Nothing to release."""


class GpuClock:
    """Times calls on the current GPU."""

    flushing: torch.Tensor | None = None

    def seconds(self, call: Callable) -> float:
        """The time of a call on the GPU, with a flushed cache."""
        if self.flushing is None:
            self.flushing = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.flushing.zero_()
        # Meanwhile the host queues the call, so that the GPU never waits for a launch.
        torch.cuda._sleep(HEAD_START_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def release(self) -> None:
        """Waits for the GPU, then releases unused memory for other processes."""
        torch.cuda.synchronize()
        self.flushing = None
        torch.cuda.empty_cache()


def medians(
    calls: dict[str, Callable], clock: CpuClock | GpuClock, seconds: float, rounds: int = 11
) -> dict[str, float]:
    """The median seconds of each call; the calls alternate.

    There are fewer rounds, but at least three, if they take longer than `seconds`.
    """
    for call in calls.values():
        clock.seconds(call)  # warms up and allocates memory
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    for done in range(rounds):
        if done >= 3 and time.perf_counter() > end:
            break
        for name, call in calls.items():
            times[name].append(clock.seconds(call))
    return {name: statistics.median(values) for name, values in times.items()}
