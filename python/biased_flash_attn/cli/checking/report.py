"""The results of `check` as tables on the terminal, and as a file for a bug report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product, starmap

import torch
from rich.table import Table

from .. import machine
from .accuracy import Row
from .forms import FORMS, TIMED
from .problems import CALLS, DTYPES, LEFT_OUT
from .timing import DENSE, FLEX, OURS, PLAIN, Timing

PEERS = (PLAIN, DENSE, FLEX)
FORWARD, TRAINING = "forward", "+ backward"


@dataclass
class Findings:
    """The results of a check so far."""

    backend: str
    rows: list[Row] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # of processes that ended early
    crashes: int = 0  # those that ended before the time was over

    def row(self, form: str, call: str, dtype: str) -> Row | None:
        wanted = form, call, dtype
        found = (row for row in self.rows if (row.form, row.call, row.dtype) == wanted)
        return next(found, None)

    @property
    def refused(self) -> list[Row]:
        return [row for row in self.rows if row.refusal]

    @property
    def wrong(self) -> list[Row]:
        return [row for row in self.rows if not row.passed and not row.refusal]

    @property
    def missing(self) -> int:
        return len(FORMS) * len(CALLS) * len(DTYPES) - len(self.rows)

    @property
    def unfinished(self) -> bool:
        """Whether checks are missing only because the time was over."""
        return bool(self.missing) and not self.wrong and not self.crashes

    @property
    def trusted(self) -> bool:
        return not self.wrong and not self.missing and any(row.passed for row in self.rows)

    @property
    def untimed(self) -> list[str]:
        timed = {timing.form for timing in self.timings}
        return [form for form in TIMED if form not in timed]

    def verdict(self) -> str:
        """Whether this machine can be trusted, if that is known, in one line."""
        kernels, done = f"the {self.backend} backend", len(self.rows) - len(self.refused)
        if self.wrong:
            return (
                f"This machine cannot be trusted with {kernels}: {len(self.wrong)} of {done} "
                "checks failed."
            )
        if self.unfinished:
            return (
                f"The check of {kernels} is not finished: {done} checks passed and {self.missing} "
                "did not run."
            )
        if self.missing:
            return (
                f"This machine cannot be trusted with {kernels}: a process crashed, and "
                f"{self.missing} checks did not run."
            )
        if not done:
            return f"This machine cannot be trusted with {kernels}: it refuses every call."
        but = f" It refuses {len(self.refused)} other calls." if self.refused else ""
        untimed = f", the times of {', '.join(self.untimed)}" if self.untimed else ""
        return (
            f"This machine can be trusted with {kernels}: all {done} checks passed.{but} Not "
            f"checked: {LEFT_OUT}{untimed}."
        )

    def reasons(self) -> Iterator[str]:
        """One line for each failure and refusal."""
        for row in self.wrong:
            where = f"{row.form}; {row.call}; {row.dtype}"
            if row.failure:
                yield f"{where}: {row.failure}"
            for error in row.errors:
                if error.fraction > 1:
                    yield (
                        f"{where}: {error.result} has an error of {error.error:.2g}, "
                        f"{error.allowed:.2g} is allowed; worst at {error.place}"
                    )
            if not row.repeats:
                yield f"{where}: a second run gave different results"
        yield from dict.fromkeys(row.refusal for row in self.refused)
        yield from self.problems


def accuracy_table(findings: Findings) -> Table:
    table = Table("bias", "call", *DTYPES, title="Largest error, as a fraction of what is allowed")
    for form in FORMS:
        for call in map(str, CALLS):
            cells = (cell(findings.row(form, call, dtype)) for dtype in DTYPES)
            table.add_row(form, call, *cells, end_section=call == str(CALLS[-1]))
    return table


def cell(row: Row | None) -> str:
    color = "yellow" if row is None or row.refusal else "green" if row.passed else "red"
    return f"[{color}]{outcome(row)}[/{color}]"


def outcome(row: Row | None) -> str:
    if row is None:
        return "not run"
    if row.refusal or row.failure:
        return "refused" if row.refusal else "failed"
    worst = row.worst
    if worst.fraction > 1:
        return f"{worst.fraction:.3g} WRONG: {worst.result}"
    return f"{worst.fraction:.2f}" if row.repeats else "differs when repeated"


def timing_table(findings: Findings, what: str) -> Table:
    table = Table("bias", "pass", "ms", *PEERS, title=f"Time of {what}; peers as multiples of ours")
    for timing in findings.timings:
        table.add_row(timing.form, FORWARD, *times(timing.forward))
        table.add_row("", TRAINING, *times(timing.training), end_section=True)
    return table


def times(seconds: dict[str, float]) -> Iterator[str]:
    """Our time in milliseconds, and the times of the peers relative to it."""
    yield f"{1e3 * seconds[OURS]:.3g}"
    for name in PEERS:
        yield f"{seconds[name] / seconds[OURS]:.2f}x" if name in seconds else "-"


def notes(findings: Findings) -> Iterator[str]:
    """The limitations of peers, without repetitions."""
    for note, forms in grouped(findings.timings).items():
        yield f"{note} ({', '.join(forms)})"


def grouped(timings: Iterable[Timing]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for timing in timings:
        for name, note in timing.notes.items():
            found.setdefault(f"{name}: {note}", []).append(timing.form)
    return found


def environment(device: str, backend: str) -> dict[str, object]:
    """The machine and the versions."""
    found = machine.host() if device == "cpu" else machine.gpu()
    found |= {"threads": torch.get_num_threads(), "backend": backend}
    found |= machine.versions("biased-flash-attn", "torch")
    if backend == "triton":
        from triton import __version__

        found["triton"] = __version__
    if device != "cpu":
        found |= {"cuda": torch.version.cuda or torch.version.hip}
    return found


def markdown(findings: Findings, about: dict[str, object], what: str) -> str:
    """The report, complete in one file."""
    lines = ["# biased_flash_attn check", "", f"**{findings.verdict()}**", ""]
    if reasons := list(findings.reasons()):
        lines += [*(f"- {reason}" for reason in reasons), ""]
    lines += ["## Machine", "", *rows_of([["what", "value"], *map(list, about.items())])]
    lines += ["", "## Results", ""]
    cells = [["bias", "call", "dtype", "result", "error", "allowed", "fraction", "place"]]
    order = product(FORMS, map(str, CALLS), DTYPES)
    for row in filter(None, starmap(findings.row, order)):
        where = [row.form, row.call, row.dtype]
        for e in row.errors:
            numbers = (f"{x:.3g}" for x in (e.error, e.allowed, e.fraction))
            cells.append([*where, e.result, *numbers, e.place])
        if not row.errors:
            cells.append([*where, outcome(row), "", "", "", row.failure or row.refusal])
    lines += [*rows_of(cells), "", f"## Time of {what}, in milliseconds", ""]
    cells = [["bias", "pass", OURS, *PEERS]]
    for timing in findings.timings:
        for name, seconds in ((FORWARD, timing.forward), (TRAINING, timing.training)):
            own = (f"{1e3 * seconds[x]:.4g}" if x in seconds else "-" for x in (OURS, *PEERS))
            cells.append([timing.form, name, *own])
    lines += [*rows_of(cells), "", *(f"- {note}" for note in notes(findings))]
    return "\n".join(lines).rstrip() + "\n"


def rows_of(cells: list[list]) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield from (line([*map(str, row)]) for row in cells[:1])
    yield line(["---"] * len(cells[0]))
    yield from (line([*map(str, row)]) for row in cells[1:])


def line(cells: list[str]) -> str:
    # "|" would end the cell.
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
