"""What all repetitions have in common: distances are shorter, and quotients are compared."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..experiment import Settings
from ..experiment.report import Reference, nats
from ..experiment.uncertainty import Sample, perplexity
from ..tables import shown, table
from ..training import Results, minutes

SCALE = 8  # by which lengths and distances are divided
OCTAVES = SCALE.bit_length() - 1


class Preset(ABC):
    """A table or a figure of a paper, and experiments with small models that repeat it."""

    @abstractmethod
    def experiments(self, seeds: tuple[int, ...], steps: int | None = None) -> list[Settings]:
        """One for each training length; steps of training if they are not the preset's own."""

    @abstractmethod
    def beside(self, settings: Settings, results: Results, reference: Reference) -> str:
        """The results of one experiment beside what the paper has, as Markdown."""


@dataclass(frozen=True)
class Printed:
    """What a paper prints for one model.

    label: what the paper calls the scheme. scheme: its name in `nn.positions`.
    values: by length, without those of a dash.
    """

    label: str
    scheme: str
    values: dict[int, float]


# These defaults are for distances of the papers.
SHORTER = {
    "clipped_table": f"clipped_table(max_distance={128 // SCALE})",
    "fire": f"fire(init_c={0.1 * SCALE}, init_length={512 / SCALE})",
}
SCALED = (
    f" Lengths are divided by {SCALE}, and so are distances in windows, tables, slopes of ALiBi and"
    " the initial values of FIRE. Other biases are as they are, so that relative to the lengths"
    " their range is another one than in the paper."
)


def scaled(scheme: str) -> str:
    """A scheme of the presets for distances that are divided by SCALE."""
    if scheme in SHORTER:
        return SHORTER[scheme]
    name = scheme.partition("(")[0]
    if name not in ("alibi", "window"):
        return scheme
    call = ast.parse(scheme if "(" in scheme else f"{scheme}()", mode="eval").body
    if name == "window":
        reach = call.args[0].value - 1  # a query sees itself, too
        return f"window({round(reach / SCALE) + 1})"
    options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    exponent = "exponent" if "exponent" in options else "shift"
    options[exponent] = options.get(exponent, 0) - OCTAVES
    return f"alibi({', '.join(f'{name}={value!r}' for name, value in options.items())})"


def training(settings: Settings, results: Results) -> str:
    """How the models here are trained, as sentences."""
    size = settings.size
    seeds = ", ".join(map(str, settings.seeds))
    return (
        f"Here: {size.layers} layers of {size.dim} channels, {size.heads} heads, trained at"
        f" {settings.train_length} bytes for {size.steps} steps of {size.batch} sequences, seeds"
        f" {seeds}. Training took {minutes(results):.0f} minutes, summed over the models."
    )


def quotients(
    printed: Sequence[Printed],
    train_length: int,
    results: Results,
    reference: Reference,
    compared: str = "",
) -> str:
    """A table of quotients: of what the paper prints, and of perplexities here.

    The first column has values at the shortest length that the paper prints, from that of training
    on, divided by that of the first row. The others have those at longer lengths divided by that at
    the shortest one, and before them, if this is longer than that of training, a quotient of both,
    which only models here have. `compared` says in the header what is divided, unless it is the
    same in the paper and here.
    """
    sample, first = Sample(reference.blocks), printed[0]
    base, *longer = sorted(n for n in first.values if n >= train_length)
    of_first = nats(results[scaled(first.scheme)], base // SCALE)
    pairs = [(base, train_length)] * (base > train_length) + [(length, base) for length in longer]
    names = [f"{base} / that of {first.label}", *(f"{n} / {other}" for n, other in pairs)]
    rows = [["paper", "here", *(f"{name}: {compared}" if compared else name for name in names)]]
    for row in printed:
        models = results[scaled(row.scheme)]
        losses = {n: nats(models, n // SCALE) for n in (train_length, base, *longer)}
        cells = [_cell(row.values[base] / first.values[base], sample, losses[base], of_first)]
        for n, other in pairs:
            both = n in row.values and other in row.values
            quotient = row.values[n] / row.values[other] if both else None
            cells.append(_cell(quotient, sample, losses[n], losses[other]))
        rows.append([row.label, scaled(row.scheme), *cells])
    return table(rows)


def _cell(
    printed: float | None, sample: Sample, losses: Tensor | None, reference: Tensor | None
) -> str:
    if losses is None or reference is None:
        return "-"
    theirs = "-" if printed is None else f"{printed:.2f}"
    return f"{theirs}, {shown(perplexity(sample.interval(losses - reference)), 2)}"
