"""What all repetitions have in common: most have shorter distances than the paper."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ...nn.positions import parsed
from ..experiment import Settings
from ..experiment.report import Reference, perplexities
from ..experiment.uncertainty import Sample
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
    " the initial values of FIRE, but in no other scheme."
)


def scaled(scheme: str) -> str:
    """A scheme of the presets for distances that are divided by SCALE."""
    if scheme in SHORTER:
        return SHORTER[scheme]
    name, values, options = parsed(scheme)
    if name == "window":
        (width,) = values
        reach = width - 1  # a query sees itself, too
        return f"window({round(reach / SCALE) + 1})"
    if name != "alibi":
        return scheme
    exponent = "exponent" if "exponent" in options else "shift"
    options[exponent] = options.get(exponent, 0) - OCTAVES
    return f"alibi({', '.join(f'{key}={value!r}' for key, value in options.items())})"


def training(settings: Settings, results: Results, reference: Reference) -> str:
    """How the models here are trained, and their perplexity there beside that of counts."""
    size, length, unit = settings.size, settings.train_length, settings.size.unit
    curves = perplexities(settings, results, Sample(reference.blocks))
    found = sorted(curve[length].mean for curve in curves.values())
    reached = " to ".join(dict.fromkeys(f"{x:.3g}" for x in (found[0], found[-1])))
    return (
        f"Here: {size.layers} layers of {size.dim} channels, {size.heads} heads, trained at"
        f" {length} {unit} for {size.steps} steps of {size.batch} sequences;"
        f" {counted(len(settings.seeds), 'seed')}. Training took {minutes(results):.0f} minutes,"
        f" summed over {counted(len(results), 'scheme')}. Perplexity at {length} {unit}: {reached};"
        f" of counts that know {settings.prediction.context_of_counts(unit)}:"
        f" {reference.perplexity:.3g}."
    )


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
