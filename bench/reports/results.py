"""Measurements, stored as a JSON file and as a table for readers.

Targets are stored in the JSON file and shown where a benchmark runs; the table has results only.

    python -m bench.reports.results    rewrites the tables of all JSON files in bench/results/
"""

from __future__ import annotations

import json
import operator
import re
import statistics
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path

from bench import RESULTS

COMPARISONS = {">=": operator.ge, "<=": operator.le}
AIM_HEADINGS = ["target", "to reach", "met", "worst", "where"]
HEADINGS = ["work", "dtype", "ours", "other", "measured (range)"]


@dataclass(frozen=True)
class Row:
    """One measurement, repeated in rounds."""

    work: str
    dtype: str
    values: list[float]  # one per round
    unit: str  # appended to a value
    comparison: str | None  # of the median with the target, ">=" or "<="
    target: float | None
    ours: list[float] | None = None  # seconds, one per round
    other: list[float] | None = None  # seconds of the alternative
    aim: str | None = None  # the name of the target, if several rows share it
    failure: str | None = None  # why there are no values
    group: str | None = None  # the heading of the table that it belongs to

    @property
    def measured(self) -> float | None:
        return statistics.median(self.values) if self.values else None

    @property
    def met(self) -> bool | None:
        if self.target is None or not self.values:
            return None
        return COMPARISONS[self.comparison](self.measured, self.target)

    def cells(self) -> list[str]:
        """The row of a table with HEADINGS."""
        return [
            self.work,
            self.dtype,
            milliseconds(self.ours),
            milliseconds(self.other),
            self.found(),
        ]

    def verdict(self) -> str:
        """The target and whether it was met, or nothing."""
        if self.target is None:
            return ""
        met = {True: "met", False: "not met", None: "not measured"}[self.met]
        return f"target {self.comparison} {self.target}{self.unit}: {met}"

    def found(self) -> str:
        if not self.values:
            reason = f"failed: {self.failure}".replace("|", "/")  # "|" would end the cell
            return reason if len(reason) <= 60 else f"{reason[:57]}..."
        low, high = min(self.values), max(self.values)
        spread = f" ({three_digits(low)} to {three_digits(high)})" if low < high else ""
        return f"{three_digits(self.measured)}{self.unit}{spread}"


def three_digits(x: float) -> str:
    """Three significant digits, or all digits of the integer part from 1000 on."""
    return f"{x:.0f}" if abs(x) >= 99.95 else f"{x:#.3g}"


def milliseconds(seconds: list[float] | None) -> str:
    """The median."""
    return f"{three_digits(1e3 * statistics.median(seconds))} ms" if seconds else ""


def save(
    rows: list[Row], folder: Path, where: dict, now: datetime | None = None, suffix: str = ""
) -> Path:
    """Writes the rows and their environment to a JSON file, and a table with the same name.

    Calls with the same `now` and suffix overwrite the same files.
    """
    now = now or datetime.now(timezone.utc)
    result = {
        **where,
        "date": f"{now:%Y-%m-%d %H:%M} UTC",
        "rows": [{**asdict(row), "measured": row.measured, "met": row.met} for row in rows],
    }
    machine = result["machine"]
    name = machine.get("gpu") or f"{machine['processor']} {machine['cores']} cores"
    path = folder / re.sub(r"[^a-z0-9]+", "-", name.lower()) / f"{now:%Y-%m-%d-%H%M}{suffix}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(result))
    return path


def markdown(result: dict) -> str:
    """The environment, and a table of the rows of each group."""
    rows, parts = rows_of(result), [heading(result)]
    for group in dict.fromkeys(row.group for row in rows):
        lines = [HEADINGS, *(row.cells() for row in rows if row.group == group)]
        parts += [f"## {group}", table(lines)] if group else [table(lines)]
    return "\n\n".join(parts) + "\n"


def rows_of(result: dict) -> list[Row]:
    """The rows of a JSON file, of which older ones lack some fields."""
    names = [field.name for field in fields(Row)]
    return [Row(**{name: row[name] for name in names if name in row}) for row in result["rows"]]


def table(lines: list[list[str]]) -> str:
    """A Markdown table with aligned columns; the first line is the heading."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * width for width in widths]
    padded = (
        [cell.ljust(w) for cell, w in zip(line, widths, strict=True)]
        for line in (lines[0], rule, *lines[1:])
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def aims(rows: list[Row]) -> list[list[str]]:
    """Rows of a table with AIM_HEADINGS: how often each target was met, and its worst case."""
    lines = []
    for aim in dict.fromkeys(row.aim for row in rows if row.aim):
        aim_results = [row for row in rows if row.aim == aim]
        measured = sorted((row for row in aim_results if row.values), key=lambda row: row.measured)
        at_most = aim_results[0].comparison == "<="
        worst = measured[-1 if at_most else 0] if measured else None
        lines.append(
            [
                aim,
                f"{aim_results[0].comparison} {aim_results[0].target}{aim_results[0].unit}",
                f"{sum(row.met for row in measured)} of {len(aim_results)}",
                f"{three_digits(worst.measured)}{worst.unit}" if worst else "",
                worst.work if worst else "",
            ]
        )
    return lines


def heading(result: dict) -> str:
    machine, setting = result["machine"], result["setting"]
    if "gpu" in machine:
        return gpu_heading(result)
    libraries = {**result["versions"]}
    for tool in ("biased-flash-attn", "pytest-benchmark"):
        libraries.pop(tool, None)
    shape = (
        ""
        if "length" not in setting
        else (
            f"B = 1, H = {setting['heads']}, D = {setting['head_dim']}, N = {setting['length']}, "
            "causal, forward and backward, unless stated otherwise.\n"
        )
    )
    return (
        f"{machine['processor']}, {machine['cores']} cores, {setting['threads']} threads, "
        f"{machine['instruction_set']} kernels; "
        f"{', '.join(' '.join(x) for x in libraries.items())}; commit {result['commit']}; "
        f"{result['date']}.\n"
        f"{shape}"
        "Both sides of a ratio are timed alternately. `measured` is the median of the ratios of "
        "all rounds, with their range; times are medians."
    )


def gpu_heading(result: dict) -> str:
    machine, setting, versions = result["machine"], result["setting"], result["versions"]
    left = "; ".join(setting.get("not_measured", ()))
    return (
        f"{machine['gpu']}, driver {machine['driver']}; torch {versions['torch']}, "
        f"triton {versions['triton']}, CUDA {versions['cuda']}, cuDNN {versions['cudnn']}; commit "
        f"{result['commit']}; {result['date']}.\n"
        f"{setting['tokens']} tokens in all, H = {setting['hidden']} / D, causal, bfloat16.\n"
        "Both sides of a ratio are timed alternately, without launch overhead and with a flushed "
        "cache. `measured` is the median of the ratios of all rounds, with their range; times are "
        "medians." + f"\nNot measured: {left}." * bool(left)
    )


if __name__ == "__main__":
    for path in RESULTS.glob("*/????-??-??-????*.json"):
        path.with_suffix(".md").write_text(markdown(json.loads(path.read_text())))
