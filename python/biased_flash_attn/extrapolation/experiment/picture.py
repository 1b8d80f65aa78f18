"""The plots of an experiment. Importing it needs matplotlib and plotly, which are optional."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from .. import interactive
from ..labelled_curves import finish, label_ends, plot
from ..measures import styles
from ..training import Results
from .report import Reference, description, field_of_gradient, inputs_of_blocks, measures
from .settings import Settings


def write(settings: Settings, results: Results, reference: Reference, folder: Path) -> list[Path]:
    """Writes results.png and results.html; returns their paths."""
    paths = [folder / "results.png", folder / "results.html"]
    draw(settings, results, reference).savefig(paths[0], dpi=120)
    paths[1].write_text(page(settings, results, reference), encoding="utf-8")
    return paths


def draw(settings: Settings, results: Results, reference: Reference) -> Figure:
    """Perplexity against context with intervals, and receptive fields.

    The curves of series and gradients are those of the models of the first seed.
    """
    first = {name: next(iter(models.values())) for name, models in results.items()}
    has_gradients = any("gradient" in model for model in first.values())
    rows = 2 if has_gradients else 1
    figure = Figure(figsize=(15, 5 * rows), layout="constrained")
    losses, theory, *others = figure.subplots(rows, 2).flat
    measure = measures(settings, results, reference)[0]
    plot(losses, measure, settings.eval_lengths)
    losses.set(title=measure.name)
    low, high = losses.get_ylim()
    narrow = high < 10 * low
    losses.yaxis.set_major_locator(MaxNLocator(8) if narrow else LogLocator(subs=(1, 2, 5)))
    losses.yaxis.set_major_formatter("{x:g}")
    losses.yaxis.set_minor_locator(NullLocator())
    finish(losses, settings.train_length)

    series = {name: model["theory"] for name, model in first.items() if model["theory"]}
    _draw_curves(theory, series, list(first), "eps")
    theory.set(title="fraction of exp(bias) beyond", xlabel="distance", xscale="symlog")
    finish(theory, settings.train_length)
    if has_gradients:
        gradient, blocks = others
        found = {name: model["gradient"] for name, model in first.items() if "gradient" in model}
        _draw_curves(gradient, found, list(first), "share")
        gradient.set(title="cumulative normalized gradient", xlabel="most recent tokens")
        gradient.set(ylim=(0, 1.02))
        finish(gradient, settings.train_length)
        _draw_fields(blocks, settings, results)
    return figure


def _draw_curves(
    axes: Axes, curves: dict[str, dict[str, object]], names: list[str], values: str
) -> None:
    for name, style in styles(names).items():
        if name in curves:
            axes.plot(curves[name]["tokens"], curves[name][values], label=name, **style)
    if axes.lines:
        axes.legend(fontsize=8)


def _draw_fields(axes: Axes, settings: Settings, results: Results) -> None:
    """The receptive field of the gradient at the input of each block, with standard errors."""
    layers, ends = inputs_of_blocks(settings.size.layers), {}
    for name, style in styles(list(results)).items():
        found = [field_of_gradient(results[name], layer) for layer in layers]
        if None not in found:
            means, errors = zip(*found, strict=True)
            axes.errorbar(range(len(layers)), means, errors, capsize=3, **style)
            ends[name] = (len(layers) - 1, means[-1], style["color"])
    axes.set(title="receptive field of the gradient ± error over sequences", yscale="log")
    axes.set(xlabel="at the input of block")
    axes.set_xticks(range(len(layers)))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    label_ends(axes, ends)


def page(
    settings: Settings, results: Results, reference: Reference, library: str | bool = True
) -> str:
    """The perplexities as HTML, with a menu of measures; `library` is as in `interactive.page`."""
    return interactive.page(
        "Perplexity by context",
        description(settings, results, reference),
        measures(settings, results, reference),
        settings.eval_lengths,
        settings.train_length,
        library,
    )
