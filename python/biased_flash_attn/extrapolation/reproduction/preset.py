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


def training(settings: Settings, results: Results) -> str:
    """How the models here are trained, as a sentence."""
    size = settings.size
    return (
        f"Here: {size.layers} layers of {size.dim} channels, {size.heads} heads, trained at"
        f" {settings.train_length} bytes for {size.steps} steps of {size.batch}, seeds"
        f" {', '.join(map(str, settings.seeds))}, in {minutes(results):.0f} minutes. Lengths,"
        f" windows, tables and slopes of ALiBi are for distances divided by {SCALE}, other biases"
        " are as they are."
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
    on, divided by that of the first row; the others those at longer lengths divided by that at the
    shortest one. `compared` says in the header what both are, unless they are the same.
    """
    sample, first = Sample(reference.blocks), printed[0]
    base, *longer = sorted(n for n in first.values if n >= train_length)
    of_first = nats(results[scaled(first.scheme)], base // SCALE)
    names = [f"{base} / that of {first.label}", *(f"{length} / {base}" for length in longer)]
    rows = [["paper", "here", *(f"{name}: {compared}" if compared else name for name in names)]]
    for row in printed:
        models = results[scaled(row.scheme)]
        at_base = nats(models, base // SCALE)
        cells = [_cell(row.values[base] / first.values[base], sample, at_base, of_first)]
        for length in longer:
            theirs = row.values.get(length)
            quotient = None if theirs is None else theirs / row.values[base]
            cells.append(_cell(quotient, sample, nats(models, length // SCALE), at_base))
        rows.append([row.label, scaled(row.scheme), *cells])
    return table(rows)


def _cell(
    printed: float | None, sample: Sample, losses: Tensor | None, reference: Tensor | None
) -> str:
    if printed is None or losses is None or reference is None:
        return "-"
    return f"{printed:.2f}, {shown(perplexity(sample.interval(losses - reference)), 2)}"
