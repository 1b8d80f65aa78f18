"""Runs the work of `check` in processes, compiling side by side and timing one after the other.

In a process of its own, what a kernel does to a GPU's context ends no other checks, and what takes
too long can be ended.
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
from collections.abc import Iterator
from dataclasses import dataclass

from .failures import LONGEST
from .work import Done, Event, Prepare, Settings, Task, Time, checks

COMMAND = [sys.executable, "-c", f"from {__package__}.work import main; main()"]


@dataclass(frozen=True)
class Ended:
    """A process ended early: what it was doing, and why it ended."""

    task: str
    reason: str


class Worker:
    """A process, whose events go to a queue, None at the end."""

    def __init__(self, settings: Settings, alone: bool, events: queue.Queue):
        self.task: Task | None = None
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        # Side by side each has a core. Alone, threads that spin while they wait would take the
        # cores from other programs, and from the threads that they wait for.
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
        with contextlib.suppress(BrokenPipeError):  # it ended; the reason follows
            self.process.stdin.write(pickle.dumps(message))
            self.process.stdin.flush()

    def begin(self, task: Task) -> None:
        self.task = task
        self.tell(task)

    def read(self, events: queue.Queue) -> None:
        with contextlib.suppress(EOFError, pickle.UnpicklingError):  # it may end amid an event
            while True:
                events.put((self, pickle.load(self.process.stdout)))
        events.put((self, None))

    def ended(self) -> Ended | None:
        """Why a process that sent its last event ended, where it did not end well."""
        if (status := self.process.wait()) == 0:
            return None
        self.log.seek(0)
        lines = self.log.read().strip().splitlines() or ["it left no message"]
        # CUDA's errors go on with advice after the line that has the message.
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
    """Which task is next: rows while there is time, then what is timed."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.checks = deque(checks(settings.forms))
        self.forms = deque(settings.forms)

    def next(self) -> Task | None:
        if self.checks and time.time() < self.settings.rows_end:
            return self.checks.popleft()
        if self.forms:
            return Prepare(self.forms.popleft(), time.time() < self.settings.peers_end)
        return None


def spread(settings: Settings, workers: int, end: float) -> Iterator[Event | Ended]:
    """The events of all forms, from so many processes, until `end` (seconds since the epoch)."""
    schedule, events = Schedule(settings), queue.Queue()
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
                worker, event = events.get(timeout=max(0.0, end - time.time()))
            except queue.Empty:
                yield from (Ended(str(worker.task), "the time was over") for worker in busy)
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
    """Whether there was a task for the worker."""
    if task is not None:
        worker.begin(task)
    return task is not None
