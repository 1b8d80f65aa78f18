"""What a process of `check` does: the tasks that it is sent, one after the other.

Settings and tasks come pickled on stdin, and the events of a task go pickled to stdout.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch

from . import accuracy
from .accuracy import Row
from .failures import described, is_out_of_memory
from .problems import CALLS, DTYPES, Call
from .timing import Race, Timing

# On CPUs FlexAttention has no training to compare with and takes 20 s to compile, so that it
# competes in one form only.
FLEX_ON_CPUS = "linear"
# What has the same numbers, and so the same float64 results, is one task.
TOGETHER = (("bfloat16", "float16"), ("float32",))


@dataclass(frozen=True)
class Settings:
    """What to check, and until when, in seconds since the epoch."""

    forms: tuple[str, ...]
    backend: str
    device: str
    seed: int
    length: int
    timed_length: int
    timed_dtype: str
    timed_head_dim: int
    rows_end: float  # no rows are begun after it
    peers_end: float  # nor is FlexAttention compiled after this


@dataclass(frozen=True)
class Check:
    """To compute the rows of a form in some dtypes."""

    form: str
    call: Call
    dtypes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.form}; {self.call}; {', '.join(self.dtypes)}"


@dataclass(frozen=True)
class Prepare:
    """To make and compile everything that Time needs."""

    form: str
    with_flex: bool

    def __str__(self) -> str:
        return f"preparing to time {self.form}"


@dataclass(frozen=True)
class Time:
    """To time a form that was prepared, while nothing else runs."""

    form: str

    def __str__(self) -> str:
        return f"timing {self.form}"


@dataclass(frozen=True)
class Done:
    """All events of a task were sent."""


@dataclass(frozen=True)
class OutOfMemory:
    """The device had too little memory for the rows of a task."""

    reason: str


Task = Check | Prepare | Time
Event = Row | Timing | Done | OutOfMemory


def checks(forms: tuple[str, ...]) -> list[Check]:
    """All rows of some forms, the most common calls first."""
    return [Check(form, call, dtypes) for call in CALLS for form in forms for dtypes in TOGETHER]


class Work:
    """Performs tasks, and keeps what is prepared until it is timed."""

    def __init__(self, settings: Settings):
        torch.set_float32_matmul_precision("highest")  # of the naive yardstick
        self.settings = settings
        self.races: dict[str, Race] = {}

    def perform(self, task: Task) -> Iterator[Event]:
        if isinstance(task, Check):
            yield from self.rows(task)
        elif isinstance(task, Prepare):
            self.races[task.form] = self.race(task.form)
            wanted = self.settings.device != "cpu" or task.form == FLEX_ON_CPUS
            self.races[task.form].prepare(with_flex=wanted and task.with_flex)
        else:
            yield self.races.pop(task.form).timing()
        yield Done()

    def rows(self, task: Check) -> Iterator[Row | OutOfMemory]:
        asked = self.settings
        where = asked.length, asked.seed, asked.device, asked.backend
        try:
            yield from accuracy.rows(task.form, task.call, *where, task.dtypes)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            yield OutOfMemory(described(error))

    def race(self, form: str) -> Race:
        asked = self.settings
        return Race(
            form,
            asked.timed_length,
            asked.timed_head_dim,
            DTYPES[asked.timed_dtype],
            asked.seed,
            asked.device,
            asked.backend,
        )


def main() -> None:
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print goes elsewhere
    work = Work(pickle.load(sys.stdin.buffer))
    with suppress(EOFError):  # nobody sends tasks any more
        while True:
            for event in work.perform(pickle.load(sys.stdin.buffer)):
                pickle.dump(event, channel)
                channel.flush()
