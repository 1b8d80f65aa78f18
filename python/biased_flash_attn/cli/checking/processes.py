"""Runs the work of `check` in processes, compiling side by side and timing one after the other.

In a process of its own, what a kernel does to a GPU's context ends no other form's checks, and what
takes too long can be ended.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .failures import LONGEST
from .work import Event, Ready, Settings

COMMAND = [sys.executable, "-c", f"from {__package__}.work import main; main()"]


@dataclass(frozen=True)
class Ended:
    """A process ended early, and why."""

    forms: tuple[str, ...]
    reason: str


class Worker:
    """A process, whose events go to a queue, None at the end."""

    def __init__(self, settings: Settings, alone: bool, events: queue.Queue):
        self.forms = settings.forms
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
        self.tell(pickle.dumps(settings))
        self.reader = threading.Thread(target=self.read, args=(events,), daemon=True)
        self.reader.start()

    def tell(self, message: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it ended; the reason follows
            self.process.stdin.write(message)
            self.process.stdin.flush()

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
        return Ended(self.forms, f"a process ended with status {status}: {lines[-1]}"[:LONGEST])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join()
        for file in (self.process.stdin, self.process.stdout, self.log):
            with contextlib.suppress(BrokenPipeError):
                file.close()


def spread(settings: Settings, workers: int, end: float) -> Iterator[Event | Ended]:
    """The events of all forms, which so many processes share, until `end` (seconds since epoch)."""
    groups = [settings.forms[i::workers] for i in range(workers)]
    events: queue.Queue = queue.Queue()
    running: list[Worker] = []
    waiting: list[Worker] = []  # ready to be timed
    try:
        for forms in groups:
            running.append(Worker(replace(settings, forms=forms), workers == 1, events))
        busy = set(running)
        while busy or waiting:
            if not busy:
                busy.add(waiting.pop(0))
                next(iter(busy)).tell(b"go\n")
            try:
                worker, event = events.get(timeout=max(0.0, end - time.time()))
            except queue.Empty:
                for worker in busy | set(waiting):
                    yield Ended(worker.forms, "the time was over")
                return
            if isinstance(event, Ready):
                busy.remove(worker)
                waiting.append(worker)
            elif event is not None:
                yield event
            else:
                busy.discard(worker)
                waiting = [other for other in waiting if other is not worker]
                if ended := worker.ended():
                    yield ended
    finally:
        for worker in running:
            worker.close()
