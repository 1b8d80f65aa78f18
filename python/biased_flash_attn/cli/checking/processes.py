"""Runs the tasks of `check` in processes, which compile in parallel and are timed one by one.

A kernel that breaks the GPU context of its process does not affect other checks, and processes that
take too long can be terminated.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import torch

from ...backends import RefusedError
from . import accuracy
from .accuracy import LONGEST, Row, described, is_out_of_memory
from .forms import EXAMPLE, TIMED
from .problems import CALLS, DTYPES, Call
from .timing import Race, Timing

# Dtypes with the same numbers, and so the same float64 results, form one task.
DTYPE_GROUPS = (("bfloat16", "float16"), ("float32",))
OUT_OF_TIME = "the time limit was reached"
SPAWN = multiprocessing.get_context("spawn")


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


class Task(NamedTuple):
    """kind: a method of `Work`. Of a form, "check" computes the rows of a call for some dtypes,
    "prepare" creates and compiles everything that "time" needs, which runs while nothing else does.
    """

    kind: str
    form: str
    call: Call | None = None
    dtypes: tuple[str, ...] = ()
    with_flex: bool = False

    def __str__(self) -> str:
        details = (f"; {self.call}; {', '.join(self.dtypes)}") if self.call else ""
        return f"{self.kind} {self.form}{details}"


@dataclass(frozen=True)
class OutOfMemory:
    """The memory of the device was exhausted by the rows of a task."""

    reason: str


@dataclass(frozen=True)
class Ended:
    """A process that ended early: its task, and the reason."""

    task: str
    reason: str


Event = Row | Timing | OutOfMemory | Ended


def schedule(settings: Settings, clock: Callable[[], float]) -> Iterator[Task]:
    """The checks until their time limit, the most common calls first, then the forms to time."""
    for call in CALLS:
        for form in settings.forms:
            for dtypes in DTYPE_GROUPS:
                if clock() < settings.rows_end:
                    yield Task("check", form, call, dtypes)
    for form in settings.forms:
        if form in TIMED:
            yield Task("prepare", form, with_flex=clock() < settings.peers_end)


class Work:
    """Performs tasks, and keeps prepared forms until they are timed."""

    def __init__(self, settings: Settings):
        torch.set_float32_matmul_precision("highest")  # for naive attention
        self.settings = settings
        self.races: dict[str, Race] = {}

    def perform(self, task: Task) -> Iterator[Event]:
        yield from getattr(self, task.kind)(task)

    def check(self, task: Task) -> Iterator[Event]:
        settings = self.settings
        where = settings.length, settings.seed, settings.device, settings.backend
        try:
            yield from accuracy.rows(task.form, task.call, *where, task.dtypes)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            yield OutOfMemory(described(error))

    def prepare(self, task: Task) -> tuple[()]:
        settings = self.settings
        race = Race(
            task.form,
            settings.timed_length,
            settings.timed_head_dim,
            DTYPES[settings.timed_dtype],
            settings.seed,
            settings.device,
            settings.backend,
        )
        # On CPUs FlexAttention has no backward pass and takes 20 s to compile.
        wanted = settings.device != "cpu" or task.form == EXAMPLE
        with suppress(RefusedError):
            race.prepare(with_flex=wanted and task.with_flex)
            self.races[task.form] = race
        return ()

    def time(self, task: Task) -> Iterator[Event]:
        if task.form in self.races:  # and not refused
            yield self.races.pop(task.form).timing()


def work(channel: Connection, settings: Settings) -> None:
    """Performs the tasks that are received, and sends their events and None after each task."""
    own = Work(settings)
    while True:
        for event in own.perform(channel.recv()):
            channel.send(event)
        channel.send(None)


def logged(log: Path, function: Callable, *arguments) -> None:
    """Runs a function with the output of its process in a file."""
    with log.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        function(*arguments)


class Worker:
    """A process that performs one task at a time."""

    def __init__(self, settings: Settings, alone: bool, log: Path):
        self.task: Task | None = None
        self.log = log
        self.channel, theirs = SPAWN.Pipe()
        # In parallel each process has one core. A single process has several threads, which must
        # not spin while they wait, as they would compete with the threads that they wait for.
        single = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        patient = {"OMP_WAIT_POLICY": "passive"}
        # Processes are killed, while Inductor may hold semaphores.
        quiet = {"PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker"}
        arguments = log, work, theirs, settings
        self.process = SPAWN.Process(target=logged, args=arguments, daemon=True)
        defaults = quiet | (patient if alone else single)
        own = {name: x for name, x in defaults.items() if name not in os.environ}
        os.environ.update(own)
        try:
            self.process.start()
        finally:
            for name in own:
                del os.environ[name]
        theirs.close()

    def begin(self, task: Task | None) -> bool:
        """Starts the task, and returns whether there was one."""
        if task is not None:
            self.task = task
            with suppress(BrokenPipeError):  # it ended; the reason is reported later
                self.channel.send(task)
        return task is not None

    def ended(self) -> Ended:
        """Why the process ended."""
        self.process.join()
        lines = self.log.read_text().strip().splitlines() if self.log.exists() else []
        # In CUDA errors, advice follows the line with the message.
        raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
        reason = (raised or lines or ["there is no error message"])[-1]
        status = self.process.exitcode
        return Ended(str(self.task), f"a process ended with status {status}: {reason}"[:LONGEST])

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.channel.close()


def spread(
    settings: Settings, workers: int, end: float, clock: Callable[[], float] = time.time
) -> Iterator[Event]:
    """The events of all forms from several processes, until `end`.

    clock: returns the present time in seconds, of the same epoch as `end` and those of settings.
    """
    tasks, running = schedule(settings, clock), []
    prepared: deque[tuple[str, Worker]] = deque()
    with tempfile.TemporaryDirectory() as logs:
        try:
            for n in range(workers):
                running.append(Worker(settings, workers == 1, Path(logs, str(n))))
            busy = {worker.channel: worker for worker in running if worker.begin(next(tasks, None))}
            while busy or prepared:
                if not busy:
                    form, worker = prepared.popleft()
                    worker.begin(Task("time", form))
                    busy[worker.channel] = worker
                ready = wait(busy, timeout=max(0.0, end - clock()))
                if not ready:
                    yield from (Ended(str(one.task), OUT_OF_TIME) for one in busy.values())
                    return
                for channel in ready:
                    worker = busy[channel]
                    try:
                        event = channel.recv()
                    except (EOFError, OSError):
                        del busy[channel]
                        prepared = deque(pair for pair in prepared if pair[1] is not worker)
                        yield worker.ended()
                        continue
                    if event is not None:
                        yield event
                        continue
                    if worker.task.kind == "prepare":
                        prepared.append((worker.task.form, worker))
                    if worker.task.kind == "time" or not worker.begin(next(tasks, None)):
                        del busy[channel]
        finally:
            for worker in running:
                worker.close()
