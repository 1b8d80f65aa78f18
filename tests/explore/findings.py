"""What an exploration found, and how it is shown."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import PurePosixPath

from rich.console import Console
from rich.table import Table

from .rounds import Case, Result

# A correct result that comes nearer to its bound will exceed it with some seed: the bound is not
# derived from what determines the error.
SUSPICIOUS = 0.7
LONGEST = 12  # lines of a failure


def command(case: Case) -> str:
    return f"pytest '{case.test}' --seed={case.seed}"


def folder(case: Case) -> str:
    return str(PurePosixPath(case.test.split("::")[0]).parent)


class Findings:
    """Counts by folder, the failures, and the largest ratio of an error to its bound by test."""

    def __init__(self, console: Console):
        self.console = console
        self.seeds: dict[str, set[int]] = defaultdict(set)
        self.cases: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.nearest: dict[str, Result] = {}

    def __str__(self) -> str:
        return f"{self.cases.total():,} cases, {self.failures.total():,} failures"

    def add(self, result: Result) -> None:
        if result.skipped:
            return
        case = result.case
        self.seeds[folder(case)].add(case.seed)
        self.cases[folder(case)] += 1
        if result.failure:
            self.failures[folder(case)] += 1
            self.console.rule(f"failure {self.failures.total()}", style="red")
            self.console.out("\n".join(result.failure.splitlines()[-LONGEST:]), highlight=False)
            self.console.out(f"repeat it with: {command(case)}", style="bold", highlight=False)
        elif result.ratio > SUSPICIOUS:
            function = case.test.split("[")[0]
            if function not in self.nearest or result.ratio > self.nearest[function].ratio:
                self.nearest[function] = result

    def summarize(self) -> None:
        for result in sorted(self.nearest.values(), key=lambda x: -x.ratio):
            note = f"{result.ratio:.2f} of its bound, which is not derived well: "
            self.console.out(note + command(result.case), highlight=False)
        table = Table("tests", "seeds", "cases", "failures")
        for column in table.columns[1:]:
            column.justify = "right"
        for name in sorted(self.cases):
            counts = len(self.seeds[name]), self.cases[name], self.failures[name]
            table.add_row(name, *(f"{n:,}" for n in counts))
        table.add_section()
        seeds = len(set().union(*self.seeds.values()))
        totals = seeds, self.cases.total(), self.failures.total()
        table.add_row("all", *(f"{n:,}" for n in totals))
        self.console.print(table)
