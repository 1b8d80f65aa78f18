"""How long a call takes on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 256 * 2**20  # several times the cache
HEAD_START_CYCLES = 10_000_000  # about 5 ms


class CpuClock:
    """Times calls that are done when they return."""

    def seconds(self, call: Callable) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def release(self) -> None:
        """There is nothing to give back."""


class GpuClock:
    """Times calls on the current GPU."""

    flushing: torch.Tensor | None = None

    def seconds(self, call: Callable) -> float:
        """What the GPU needs for a call, with nothing of it in the cache before."""
        if self.flushing is None:
            self.flushing = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.flushing.zero_()
        # Meanwhile the host gets ahead, so that the GPU never waits for a launch.
        torch.cuda._sleep(HEAD_START_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def release(self) -> None:
        """Waits for the GPU, then gives unused memory to other processes."""
        torch.cuda.synchronize()
        self.flushing = None
        torch.cuda.empty_cache()


def medians(
    calls: dict[str, Callable], clock: CpuClock | GpuClock, seconds: float, rounds: int = 11
) -> dict[str, float]:
    """The median seconds of each call, all of them taking turns.

    There are fewer rounds, down to three, where they would take longer than `seconds`.
    """
    for call in calls.values():
        clock.seconds(call)  # warms up, and has the memory allocated
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    for done in range(rounds):
        if done >= 3 and time.perf_counter() > end:
            break
        for name, call in calls.items():
            times[name].append(clock.seconds(call))
    return {name: statistics.median(values) for name, values in times.items()}
