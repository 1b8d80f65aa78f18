"""The plots of an experiment. Importing it needs matplotlib, an optional dependency."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from ..direct_labels import label_ends, styles
from ..training import Results
from .report import Reference, nats
from .settings import Settings
from .uncertainty import Sample, perplexity


def draw(settings: Settings, results: Results, reference: Reference) -> Figure:
    """Perplexity against context with intervals, and receptive fields of series and gradients.

    The curves of receptive fields are those of the models of the first seed.
    """
    figure = Figure(figsize=(18, 5.5), layout="constrained")
    losses, theory, gradient = figure.subplots(1, 3)
    style = styles(list(results))
    _perplexities(losses, settings, results, reference)
    first = {scheme: next(iter(models.values())) for scheme, models in results.items()}
    for scheme, result in first.items():
        if curve := result["theory"]:
            theory.plot(curve["tokens"], curve["eps"], label=scheme, **style[scheme])
        if curve := result.get("gradient"):
            gradient.plot(curve["tokens"], curve["share"], label=scheme, **style[scheme])
    theory.set(title="fraction of exp(bias) beyond", xlabel="distance", xscale="symlog")
    gradient.set(title="cumulative normalized gradient", xlabel="most recent tokens")
    gradient.set(ylim=(0, 1.02))
    for axes in (losses, theory, gradient):
        axes.axvline(settings.train_length, color="gray", linestyle="--", linewidth=1)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (theory, gradient):
        if axes.lines[:-1]:
            axes.legend(fontsize=8)
    return figure


def _perplexities(axes: Axes, settings: Settings, results: Results, reference: Reference) -> None:
    sample, lengths = Sample(reference.blocks), settings.eval_lengths
    axes.set(title=f"perplexity of {settings.size.unit}", xlabel="context")
    axes.set(xscale="log", yscale="log")
    ends = {}
    for scheme, style in styles(list(results)).items():
        losses = {n: x for n in lengths if (x := nats(results[scheme], n)) is not None}
        if not losses:
            continue
        found = [perplexity(sample.interval(x)) for x in losses.values()]
        means, low, high = zip(*found, strict=True)
        axes.plot(list(losses), means, marker="o", markersize=3, **style)
        if math.isfinite(max(high)):
            axes.fill_between(
                list(losses), low, high, color=style["color"], alpha=0.15, linewidth=0
            )
        ends[scheme] = (list(losses)[-1], means[-1], style["color"])
    axes.set_xticks(lengths, map(str, lengths))
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter("{x:g}")
    label_ends(axes, ends)
