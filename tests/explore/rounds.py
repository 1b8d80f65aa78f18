"""One process that repeats the tests, each round with another seed."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import pytest

from tests.support import numerics


@dataclass(frozen=True)
class Case:
    """A test with the seed of its inputs."""

    test: str
    seed: int


@dataclass(frozen=True)
class Result:
    """failure: what pytest prints of it. ratio: the largest one of an error to its bound, of the
    comparisons that passed."""

    case: Case
    failure: str
    ratio: float
    skipped: bool


class Rounds:
    """A plugin that takes the place of pytest's loop over the tests.

    A round runs every test once. The files of a round are shuffled, so that a short exploration
    reaches all kinds of tests; the tests of a file stay together, as they share fixtures.
    """

    def __init__(self, seeds: Iterable[int], end: float, send: Callable[[Case | Result], None]):
        self.seeds, self.end, self.send = seeds, end, send
        self.reports: list[pytest.TestReport] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session) -> bool:
        turns = itertools.chain(self.turns(session.items), [(0, None)])
        for (seed, item), (_, following) in itertools.pairwise(turns):
            if time.time() >= self.end:
                break
            session.config.option.seed = seed
            numerics.ratios.clear()
            self.reports.clear()
            case = Case(item.nodeid, seed)
            self.send(case)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self.send(self.result(case))
        return True

    def turns(self, items: list[pytest.Item]) -> Iterator[tuple[int, pytest.Item]]:
        for seed in self.seeds if items else ():
            files = [list(of_file) for _, of_file in itertools.groupby(items, lambda x: x.path)]
            random.Random(seed).shuffle(files)
            yield from ((seed, item) for of_file in files for item in of_file)

    def pytest_runtest_logreport(self, report) -> None:
        self.reports.append(report)

    def result(self, case: Case) -> Result:
        failure = "\n".join(report.longreprtext for report in self.reports if report.failed)
        skipped = any(report.skipped for report in self.reports)
        # A comparison that failed has failed its test, or was meant to.
        ratio = max((ratio for ratio in numerics.ratios if ratio <= 1), default=0.0)
        return Result(case, failure, ratio, skipped)


def repeat(arguments: Iterable[str], seeds: Iterable[int], end: float, pipe: Connection) -> None:
    """Repeats the tests that pytest's arguments select until the time `end`, and sends each case
    before it runs, then its result."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    status = pytest.main(list(arguments), plugins=[Rounds(seeds, end, pipe.send)])
    raise SystemExit(0 if status == pytest.ExitCode.TESTS_FAILED else status)
