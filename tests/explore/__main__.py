"""Runs the tests with fresh seeds until the time is over.

Prints each failure with the command that repeats it, and a table of all at the end.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import sys
import time
from multiprocessing.connection import wait

import click
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from .findings import Findings
from .rounds import Case, Result, repeat

GRACE = 300  # seconds after the end in which a test has to finish
SEEDS = 2**31


class Worker:
    """A process that repeats tests, and the case that it runs."""

    def __init__(self, arguments: tuple[str, ...], seeds: range, end: float):
        context = multiprocessing.get_context("spawn")
        self.results, sender = context.Pipe(duplex=False)
        self.arguments, self.seeds, self.end = arguments, seeds, end
        self.running: Case | None = None
        self.process = context.Process(target=repeat, args=(arguments, seeds, end, sender))
        self.process.start()
        sender.close()

    def receive(self) -> Result | None:
        """The next result, if one has arrived.

        Raises:
            EOFError: if the process has ended.
        """
        received = self.results.recv()
        self.running = received if isinstance(received, Case) else None
        return None if self.running else received

    def successor(self) -> Worker:
        """A worker that continues with the seed after the one that ended the process."""
        seeds = self.seeds[self.seeds.index(self.running.seed) + 1 :]
        return Worker(self.arguments, seeds, self.end)


def explore(workers: list[Worker], findings: Findings, progress: Progress) -> None:
    """Collects results until all workers have ended."""
    begin, end = time.time(), workers[0].end
    task = progress.add_task("", total=end - begin)
    while workers:
        now = time.time()
        progress.update(task, completed=now - begin, description=str(findings))
        ready = wait([worker.results for worker in workers], timeout=1)
        for worker in [worker for worker in workers if worker.results in ready]:
            try:
                if result := worker.receive():
                    findings.add(result)
            except EOFError:
                workers.remove(worker)
                workers += ended(worker, findings)
        if now > end + GRACE:
            for worker in workers:
                worker.process.kill()


def ended(worker: Worker, findings: Findings) -> list[Worker]:
    """The workers that take the place of one that has ended, after a failure is noted."""
    worker.process.join()
    status = worker.process.exitcode
    if worker.running is None:
        if status:
            raise click.ClickException(f"pytest ended with status {status}; see above")
        return []
    findings.add(Result(worker.running, f"the process ended with status {status}", 0.0, False))
    return [worker.successor()] if time.time() < worker.end else []


@click.command(context_settings={"ignore_unknown_options": True}, help=__doc__)
@click.option("--minutes", default=60.0, show_default=True, help="How long.")
@click.option("--seed", type=click.IntRange(1, SEEDS), help="The first seed; drawn by default.")
@click.option("--processes", default=os.cpu_count(), show_default=True, help="How many.")
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED)
def main(
    minutes: float, seed: int | None, processes: int, pytest_arguments: tuple[str, ...]
) -> None:
    first = 1 + secrets.randbelow(SEEDS) if seed is None else seed
    end, console = time.time() + 60 * minutes, Console()
    console.print(f"{processes} processes, seeds from {first} on")
    findings = Findings(console)
    workers = [
        Worker(pytest_arguments, range(first + n, 2 * SEEDS, processes), end)
        for n in range(processes)
    ]
    try:
        columns = *Progress.get_default_columns()[:3], TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as progress:
            explore(workers, findings, progress)
    finally:
        for worker in workers:
            worker.process.kill()
        findings.summarize()
    sys.exit(bool(findings.failures))


if __name__ == "__main__":
    main()
