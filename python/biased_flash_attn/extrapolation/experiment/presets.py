"""Tables of the papers at a size that two CPU cores can train, beside what the papers print.

Importing it needs SciPy, an optional dependency.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from torch import Tensor

from .. import published
from ..published import Row
from ..tables import COVERAGE, shown, table
from ..training import Results
from .report import Reference, nats
from .settings import Settings, Size
from .uncertainty import Sample, perplexity

SCALE = 8  # by which lengths and distances are divided
OCTAVES = SCALE.bit_length() - 1
STEPS = 1000


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

    def experiments(self, seeds: tuple[int, ...], steps: int = STEPS) -> list[Settings]:
        """One for each training length of the table.

        There are as many layers as in the paper, so that windows reach as far through all layers,
        relative to the training length.
        """
        size = Size(self.layers, 64, 4, steps, 64, 2e-3, blocks=2048, gradients=16, scored=4)
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
    """The scheme for distances that are divided by SCALE: windows and tables are shorter, and
    slopes of ALiBi steeper. Other biases stay as they are."""
    if scheme == "clipped_table":
        return f"clipped_table(max_distance={128 // SCALE})"
    name = scheme.partition("(")[0]
    if name not in ("alibi", "window"):
        return scheme
    call = ast.parse(scheme if "(" in scheme else f"{scheme}()", mode="eval").body
    if name == "window":
        return f"window({max(1, round(call.args[0].value / SCALE))})"
    options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    exponent = "exponent" if "exponent" in options else "shift"
    options[exponent] = options.get(exponent, 0) - OCTAVES
    return f"alibi({', '.join(f'{name}={value!r}' for name, value in options.items())})"


def beside(preset: Preset, settings: Settings, results: Results, reference: Reference) -> str:
    """The table of one experiment: what the paper prints, and what was measured here.

    The first column has perplexities at the shortest length that the paper prints, from that of
    training on, divided by that of the first row; the others those at longer lengths divided by
    that at the shortest one.
    """
    sample, size = Sample(reference.blocks), settings.size
    printed = [r for r in preset.rows() if r.train_length // SCALE == settings.train_length]
    first, *_ = printed
    base, *longer = sorted(n for n in first.perplexity if n >= first.train_length)
    of_first = nats(results[scaled(first.scheme)], base // SCALE)
    rows = [
        [
            "paper",
            "here",
            f"{base} / that of {first.label}",
            *(f"{length} / {base}" for length in longer),
        ]
    ]
    for row in printed:
        models = results[scaled(row.scheme)]
        at_base = nats(models, base // SCALE)
        cells = [_cell(row.perplexity[base] / first.perplexity[base], sample, at_base, of_first)]
        for length in longer:
            theirs = row.perplexity.get(length)
            quotient = None if theirs is None else theirs / row.perplexity[base]
            cells.append(_cell(quotient, sample, nats(models, length // SCALE), at_base))
        rows.append([row.label, scaled(row.scheme), *cells])
    return (
        f"{preset.paper}, table {preset.table}, {preset.dataset}: {first.layers} layers,"
        f" {first.heads} heads, trained at {first.train_length} tokens. Here: {size.layers} layers"
        f" of {size.dim} channels, {size.heads} heads, trained at {settings.train_length} bytes for"
        f" {size.steps} steps of {size.batch}, seeds {', '.join(map(str, settings.seeds))}."
        f" Lengths, windows, tables and slopes of ALiBi are for distances divided by {SCALE}, other"
        " biases are as they are. Quotients of perplexities at the paper's lengths: in the paper,"
        f" and here with {COVERAGE:.0%} intervals.\n\n{table(rows)}"
    )


def _cell(
    printed: float | None, sample: Sample, losses: Tensor | None, reference: Tensor | None
) -> str:
    if printed is None or losses is None or reference is None:
        return "-"
    return f"{printed:.2f}, {shown(perplexity(sample.interval(losses - reference)), 2)}"
