"""Time and memory of a call."""

import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..backends import release_memory

# Linux only. Writing 5 resets the peak of resident memory.
CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Cost:
    """Time, and additional resident memory, or None where it cannot be measured."""

    seconds: float
    mebibytes: float | None


def cost(call: Callable[[], object], repeats: int = 1, held: int = 0) -> Cost:
    """The median time of a call and its peak memory, including results and `held` bytes."""
    gc.collect()
    measurable = os.access(CLEAR_REFS, os.W_OK)
    before = reset_peak() if measurable else None
    seconds = [timed(call)]
    # Only the first call: memory that malloc keeps would count as resident before the next one.
    needed = (resident("VmHWM") - before + held) / 2**20 if measurable else None
    seconds += [timed(call) for _ in range(repeats - 1)]
    return Cost(statistics.median(seconds), needed)


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def reset_peak() -> int:
    """Resets the peak of resident memory to the present value, and returns it."""
    # Memory that the kernels or malloc keep would hide what a call needs.
    release_memory()
    ctypes.CDLL(None).malloc_trim(0)
    CLEAR_REFS.write_text("5")
    return resident("VmRSS")


def resident(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{field}:")[1].split()[0])
