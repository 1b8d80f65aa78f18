"""What was measured, and how it is kept: a JSON file, and a table of it."""

from __future__ import annotations

import json
import operator
import re
import statistics
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path

COMPARISONS = {">=": operator.ge, "<=": operator.le}
HEADINGS = ["work", "dtype", "ours", "other", "measured (range)", "to reach", ""]


@dataclass(frozen=True)
class Row:
    """One measurement, repeated in rounds."""

    work: str
    dtype: str
    values: list[float]  # one a round
    unit: str  # written behind a value
    comparison: str  # of the median with the target, ">=" or "<="
    target: float
    ours: list[float] | None = None  # seconds, one a round
    other: list[float] | None = None  # seconds of what ours is compared with

    @property
    def measured(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool:
        return COMPARISONS[self.comparison](self.measured, self.target)

    def cells(self) -> list[str]:
        """What stands under HEADINGS."""
        low, high = min(self.values), max(self.values)
        spread = f" ({three_digits(low)} to {three_digits(high)})" if low < high else ""
        return [
            self.work,
            self.dtype,
            milliseconds(self.ours),
            milliseconds(self.other),
            f"{three_digits(self.measured)}{self.unit}{spread}",
            f"{self.comparison} {self.target}{self.unit}",
            "met" if self.met else "not met",
        ]


def three_digits(x: float) -> str:
    """Three digits or, from 1000 on, all before the point."""
    return f"{x:.0f}" if abs(x) >= 99.95 else f"{x:#.3g}"


def milliseconds(seconds: list[float] | None) -> str:
    """The median."""
    return f"{three_digits(1e3 * statistics.median(seconds))} ms" if seconds else ""


def save(rows: list[Row], folder: Path, where: dict) -> Path:
    """Writes the rows and where they were measured into a new file, and a table beside it."""
    now = datetime.now(timezone.utc)
    result = {
        **where,
        "date": f"{now:%Y-%m-%d %H:%M} UTC",
        "rows": [{**asdict(row), "measured": row.measured, "met": row.met} for row in rows],
    }
    machine = result["machine"]
    name = f"{machine['processor']} {machine['cores']} cores".lower()
    path = folder / re.sub(r"[^a-z0-9]+", "-", name) / f"{now:%Y-%m-%d-%H%M}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(result))
    return path


def markdown(result: dict) -> str:
    """The result as a table, aligned to be read as text too, under how it was measured."""
    names = [field.name for field in fields(Row)]
    rows = [Row(**{name: row[name] for name in names}) for row in result["rows"]]
    lines = [HEADINGS, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = ([cell.ljust(w) for cell, w in zip(line, widths, strict=True)] for line in lines)
    table = "\n".join(f"| {' | '.join(line)} |" for line in padded)
    return f"{heading(result)}\n\n{table}\n"


def heading(result: dict) -> str:
    machine, setting = result["machine"], result["setting"]
    return (
        f"{machine['processor']}, {machine['cores']} cores, {setting['threads']} threads, "
        f"{machine['instruction_set']} kernels; torch {result['versions']['torch']}; commit "
        f"{result['commit']}; {result['date']}.\n"
        f"B = 1, H = {setting['heads']}, D = {setting['head_dim']}, N = {setting['length']}, "
        "causal, forward and backward, where nothing else is said.\n"
        "The two sides of a ratio are timed in turn. `measured` is the median of the rounds' "
        "ratios, with their range; times are medians."
    )
