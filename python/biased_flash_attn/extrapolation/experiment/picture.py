"""The plots of an experiment. Importing it needs matplotlib and plotly, which are optional."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from .. import interactive
from ..labelled_curves import finish, plot
from ..measures import styles
from ..training import Results
from .report import Reference, description, measures
from .settings import Settings


def write(settings: Settings, results: Results, reference: Reference, folder: Path) -> list[Path]:
    """Writes results.png and results.html; returns their paths."""
    paths = [folder / "results.png", folder / "results.html"]
    draw(settings, results, reference).savefig(paths[0], dpi=120)
    paths[1].write_text(page(settings, results, reference), encoding="utf-8")
    return paths


def draw(settings: Settings, results: Results, reference: Reference) -> Figure:
    """Perplexity against context with intervals, and receptive fields of series and gradients.

    The curves of receptive fields are those of the models of the first seed.
    """
    figure = Figure(figsize=(18, 5.5), layout="constrained")
    losses, theory, gradient = figure.subplots(1, 3)
    measure = measures(settings, results, reference)[0]
    plot(losses, measure, settings.eval_lengths)
    losses.set(title=measure.name)
    losses.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    losses.yaxis.set_major_formatter("{x:g}")
    losses.yaxis.set_minor_locator(NullLocator())
    for (scheme, models), style in zip(
        results.items(), styles(list(results)).values(), strict=True
    ):
        first = next(iter(models.values()))
        if curve := first["theory"]:
            theory.plot(curve["tokens"], curve["eps"], label=scheme, **style)
        if curve := first.get("gradient"):
            gradient.plot(curve["tokens"], curve["share"], label=scheme, **style)
    theory.set(title="fraction of exp(bias) beyond", xlabel="distance", xscale="symlog")
    gradient.set(title="cumulative normalized gradient", xlabel="most recent tokens")
    gradient.set(ylim=(0, 1.02))
    for axes in (theory, gradient):
        if axes.lines:
            axes.legend(fontsize=8)
    for axes in (losses, theory, gradient):
        finish(axes, settings.train_length)
    return figure


def page(settings: Settings, results: Results, reference: Reference) -> str:
    """The perplexities as HTML, with a menu of measures."""
    return interactive.page(
        "Perplexity by context",
        description(settings, results, reference),
        measures(settings, results, reference),
        settings.eval_lengths,
        settings.train_length,
    )
