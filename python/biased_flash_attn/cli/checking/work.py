"""A process of `check`, which performs tasks one by one.

It reads pickled settings and tasks from stdin and writes pickled events to stdout.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch

from ...backends import RefusedError
from . import accuracy
from .accuracy import Row
from .failures import described, is_out_of_memory
from .forms import EXAMPLE
from .problems import CALLS, DTYPES, Call
from .timing import Race, Timing

# Dtypes with the same numbers, and so the same float64 results, form one task.
DTYPE_GROUPS = (("bfloat16", "float16"), ("float32",))


@dataclass(frozen=True)
class Settings:
    """What to check, with time limits in seconds since the epoch."""

    forms: tuple[str, ...]
    backend: str
    device: str
    seed: int
    length: int
    timed_length: int
    timed_dtype: str
    timed_head_dim: int
    rows_end: float  # no row is started after this time
    peers_end: float  # FlexAttention is not compiled after this time


@dataclass(frozen=True)
class Check:
    """Computes the rows of a form for some dtypes."""

    form: str
    call: Call
    dtypes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.form}; {self.call}; {', '.join(self.dtypes)}"


@dataclass(frozen=True)
class Prepare:
    """Creates and compiles everything that Time needs."""

    form: str
    with_flex: bool

    def __str__(self) -> str:
        return f"preparing to time {self.form}"


@dataclass(frozen=True)
class Time:
    """Times a prepared form while nothing else runs."""

    form: str

    def __str__(self) -> str:
        return f"timing {self.form}"


@dataclass(frozen=True)
class Done:
    """The end of the events of a task."""


@dataclass(frozen=True)
class OutOfMemory:
    """The memory of the device was exhausted by the rows of a task."""

    reason: str


Task = Check | Prepare | Time
Event = Row | Timing | Done | OutOfMemory


def checks(forms: tuple[str, ...]) -> list[Check]:
    """All checks of some forms, the most common calls first."""
    return [
        Check(form, call, dtypes) for call in CALLS for form in forms for dtypes in DTYPE_GROUPS
    ]


class Work:
    """Performs tasks, and keeps prepared forms until they are timed."""

    def __init__(self, settings: Settings):
        torch.set_float32_matmul_precision("highest")  # for naive attention
        self.settings = settings
        self.races: dict[str, Race] = {}

    def perform(self, task: Task) -> Iterator[Event]:
        if isinstance(task, Check):
            yield from self.rows(task)
        elif isinstance(task, Prepare):
            race = self.race(task.form)
            # On CPUs FlexAttention has no backward pass and takes 20 s to compile.
            wanted = self.settings.device != "cpu" or task.form == EXAMPLE
            with suppress(RefusedError):
                race.prepare(with_flex=wanted and task.with_flex)
                self.races[task.form] = race
        elif task.form in self.races:  # and not refused
            yield self.races.pop(task.form).timing()
        yield Done()

    def rows(self, task: Check) -> Iterator[Row | OutOfMemory]:
        settings = self.settings
        where = settings.length, settings.seed, settings.device, settings.backend
        try:
            yield from accuracy.rows(task.form, task.call, *where, task.dtypes)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            yield OutOfMemory(described(error))

    def race(self, form: str) -> Race:
        settings = self.settings
        return Race(
            form,
            settings.timed_length,
            settings.timed_head_dim,
            DTYPES[settings.timed_dtype],
            settings.seed,
            settings.device,
            settings.backend,
        )


def main() -> None:
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # redirects the output of libraries
    work = Work(pickle.load(sys.stdin.buffer))
    with suppress(EOFError):  # the end of all tasks
        while True:
            for event in work.perform(pickle.load(sys.stdin.buffer)):
                pickle.dump(event, channel)
                channel.flush()
