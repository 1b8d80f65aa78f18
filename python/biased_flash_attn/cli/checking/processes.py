"""Runs the tasks of `check` in processes, which compile in parallel and are timed one by one.

A kernel that breaks the GPU context of its process does not affect other checks, and processes that
take too long can be terminated.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .failures import LONGEST
from .forms import TIMED
from .work import Done, Event, Prepare, Settings, Task, Time, checks

OUT_OF_TIME = "the time limit was reached"
COMMAND = [sys.executable, "-c", f"from {__package__}.work import main; main()"]


@dataclass(frozen=True)
class Ended:
    """A process that ended early: its task, and the reason."""

    task: str
    reason: str


class Worker:
    """A process that puts its events into a queue, and None at the end."""

    def __init__(self, settings: Settings, alone: bool, events: queue.Queue):
        self.task: Task | None = None
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        # In parallel each process has one core. A single process has several threads, which must
        # not spin while they wait, as they would compete with the threads that they wait for.
        single = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        patient = {"OMP_WAIT_POLICY": "passive"}
        self.process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=(patient if alone else single) | os.environ,
        )
        self.tell(settings)
        self.reader = threading.Thread(target=self.read, args=(events,), daemon=True)
        self.reader.start()

    def tell(self, message: Settings | Task) -> None:
        with contextlib.suppress(BrokenPipeError):  # it ended; the reason is reported later
            self.process.stdin.write(pickle.dumps(message))
            self.process.stdin.flush()

    def begin(self, task: Task) -> None:
        self.task = task
        self.tell(task)

    def read(self, events: queue.Queue) -> None:
        with contextlib.suppress(EOFError, pickle.UnpicklingError):  # it may end within an event
            while True:
                events.put((self, pickle.load(self.process.stdout)))
        events.put((self, None))

    def ended(self) -> Ended | None:
        """Why the process ended, or None if it ended normally."""
        if (status := self.process.wait()) == 0:
            return None
        self.log.seek(0)
        lines = self.log.read().strip().splitlines() or ["there is no error message"]
        # In CUDA errors, advice follows the line with the message.
        raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
        reason = (raised or lines)[-1]
        return Ended(str(self.task), f"a process ended with status {status}: {reason}"[:LONGEST])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join()
        for file in (self.process.stdin, self.process.stdout, self.log):
            with contextlib.suppress(BrokenPipeError):
                file.close()


class Schedule:
    """Selects the next task: rows until their time limit, then timings."""

    def __init__(self, settings: Settings, clock: Callable[[], float]):
        self.settings, self.clock = settings, clock
        self.checks = deque(checks(settings.forms))
        self.timed = deque(form for form in settings.forms if form in TIMED)

    def next(self) -> Task | None:
        if self.checks and self.clock() < self.settings.rows_end:
            return self.checks.popleft()
        if self.timed:
            return Prepare(self.timed.popleft(), self.clock() < self.settings.peers_end)
        return None


def spread(
    settings: Settings, workers: int, end: float, clock: Callable[[], float] = time.time
) -> Iterator[Event | Ended]:
    """The events of all forms from several processes, until `end`.

    clock: returns the present time in seconds, of the same epoch as `end` and those of settings.
    """
    schedule, events = Schedule(settings, clock), queue.Queue()
    running: list[Worker] = []
    prepared: deque[tuple[str, Worker]] = deque()
    try:
        for _ in range(workers):
            running.append(Worker(settings, workers == 1, events))
        busy = {worker for worker in running if begin(worker, schedule.next())}
        while busy or prepared:
            if not busy:
                form, worker = prepared.popleft()
                busy.add(worker)
                worker.begin(Time(form))
            try:
                worker, event = events.get(timeout=max(0.0, end - clock()))
            except queue.Empty:
                yield from (Ended(str(worker.task), OUT_OF_TIME) for worker in busy)
                return
            if event is None:
                busy.discard(worker)
                prepared = deque(pair for pair in prepared if pair[1] is not worker)
                if ended := worker.ended():
                    yield ended
            elif not isinstance(event, Done):
                yield event
            else:
                if isinstance(worker.task, Prepare):
                    prepared.append((worker.task.form, worker))
                if isinstance(worker.task, Time) or not begin(worker, schedule.next()):
                    busy.remove(worker)
    finally:
        for worker in running:
            worker.close()


def begin(worker: Worker, task: Task | None) -> bool:
    """Starts the task, and returns whether there was one."""
    if task is not None:
        worker.begin(task)
    return task is not None
