"""What all repetitions have in common: most have shorter distances than the paper."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod

from ..experiment import Settings
from ..experiment.report import Reference
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
