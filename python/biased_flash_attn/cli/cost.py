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

# Linux only. Writing 5 forgets the peak of resident memory.
CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Cost:
    """Time, and resident memory beyond what was held before; None where it is not measurable."""

    seconds: float
    mebibytes: float | None


def cost(call: Callable[[], object], repeats: int = 1, held: int = 0) -> Cost:
    """The median time of a call and its peak memory, results and `held` bytes included."""
    gc.collect()
    measurable = os.access(CLEAR_REFS, os.W_OK)
    before = forget_peak() if measurable else None
    seconds = [timed(call)]
    # Of the first call: what malloc keeps of it may be resident still when another takes more.
    needed = (resident("VmHWM") - before + held) / 2**20 if measurable else None
    seconds += [timed(call) for _ in range(repeats - 1)]
    return Cost(statistics.median(seconds), needed)


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def forget_peak() -> int:
    """Makes the peak of resident memory what is resident now, and returns it."""
    # Memory that the kernels or malloc keep would count as held before, and hide what a call needs.
    release_memory()
    ctypes.CDLL(None).malloc_trim(0)
    CLEAR_REFS.write_text("5")
    return resident("VmRSS")


def resident(field: str) -> int:
    """A field of the kernel's account of this process's memory, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{field}:")[1].split()[0])
