"""Tables of the papers at a size that two CPU cores can train, beside what the papers print."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .. import published
from ..published import Row
from ..tables import COVERAGE, Interval, shown, table
from ..training import Results
from .report import Reference, nats
from .settings import Settings, Size
from .uncertainty import Sample, perplexity

SCALE = 8  # by which lengths and distances are divided
SIZE = Size(4, 128, 4, 1000, 64, 2e-3, blocks=1024, gradients=16)
OCTAVES = SCALE.bit_length() - 1


@dataclass(frozen=True)
class Preset:
    """A table of a paper: the rows of a text and of models with so many layers.

    cache: the number of keys that evaluation keeps, if it has a sliding cache.
    """

    paper: str
    table: str
    dataset: str
    layers: int
    cache: int | None = None

    def rows(self) -> list[Row]:
        wanted = self.paper, self.table, self.dataset, self.layers
        return [r for r in published.rows() if (r.paper, r.table, r.dataset, r.layers) == wanted]

    def experiments(self, seeds: tuple[int, ...], size: Size = SIZE) -> list[Settings]:
        """One for each training length of the table."""
        by_length: dict[int, list[Row]] = {}
        for row in self.rows():
            by_length.setdefault(row.train_length, []).append(row)
        found = []
        for train_length, rows in by_length.items():
            schemes = tuple(scaled(row.scheme) for row in rows)
            lengths = {train_length, *(length for row in rows for length in row.perplexity)}
            eval_lengths = tuple(sorted(length // SCALE for length in lengths))
            cache = self.cache and self.cache // SCALE
            found.append(
                Settings(schemes, train_length // SCALE, eval_lengths, size, seeds, cache=cache)
            )
        return found


CHI, VEISI = "Chi et al., 2023", "Veisi et al., 2025"
PRESETS = {
    "chi-table-1": Preset(CHI, "1", "ArXiv", 12),
    "chi-table-2": Preset(CHI, "2", "ArXiv", 12),
    "chi-table-5": Preset(CHI, "5", "ArXiv", 12, cache=2048),
    "cable-table-3": Preset(VEISI, "3", "FineWeb-Edu-10B", 6),
}


def scaled(scheme: str) -> str:
    """The scheme for distances that are divided by SCALE: windows are narrower, and slopes of ALiBi
    steeper. Others stay as they are."""
    if window := re.fullmatch(r"window\((\d+)\)", scheme):
        return f"window({max(1, round(int(window[1]) / SCALE))})"
    if scheme.partition("(")[0] != "alibi":
        return scheme
    if exponent := re.search(r"exponent=(-?\d+)", scheme):
        return f"alibi(exponent={int(exponent[1]) - OCTAVES})"
    shift = re.search(r"shift=(-?\d+)", scheme)
    slopes = "slopes='geometric', " if "geometric" in scheme else ""
    return f"alibi({slopes}shift={(int(shift[1]) if shift else 0) - OCTAVES})"


def beside(preset: Preset, settings: Settings, results: Results, reference: Reference) -> str:
    """The table of one experiment: perplexity divided by that at the shortest length of the paper
    from that of training on, as the paper printed it and as measured here."""
    sample = Sample(reference.blocks)
    rows_of_paper = [r for r in preset.rows() if r.train_length // SCALE == settings.train_length]
    lengths = sorted({n for row in rows_of_paper for n in row.perplexity if n >= row.train_length})
    base, *longer = lengths
    rows = [["paper", "here", *(f"{n}: paper, {n // SCALE}: here" for n in longer)]]
    for row in rows_of_paper:
        models = results[scaled(row.scheme)]
        first = nats(models, base // SCALE)
        cells = []
        for length in longer:
            printed = row.perplexity.get(length)
            theirs = "-" if printed is None else f"{printed / row.perplexity[base]:.3g}"
            found = nats(models, length // SCALE)
            ours: Interval | None = None
            if found is not None and first is not None:
                ours = perplexity(sample.interval(found - first))
            cells.append(f"{theirs}, {shown(ours)}")
        rows.append([row.label, scaled(row.scheme), *cells])
    return (
        f"{preset.paper}, table {preset.table}, {preset.dataset}, trained at"
        f" {settings.train_length * SCALE} tokens; here at {settings.train_length} bytes, with"
        f" windows and slopes for distances divided by {SCALE}. Perplexity divided by that at"
        f" {base} and {base // SCALE}, with {COVERAGE:.0%} intervals:\n\n{table(rows)}"
    )
