"""The plots of an experiment. Importing it needs matplotlib, an optional dependency."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from ..labelled_curves import finish, plot, styles
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
    _perplexities(losses, settings, results, reference)
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


def _perplexities(axes: Axes, settings: Settings, results: Results, reference: Reference) -> None:
    sample, lengths = Sample(reference.blocks), settings.eval_lengths
    curves = {}
    for scheme, models in results.items():
        found = {n: x for n in lengths if (x := nats(models, n)) is not None}
        curves[scheme] = {n: perplexity(sample.interval(x)) for n, x in found.items()}
    axes.set(title=f"perplexity of {settings.size.unit}", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    plot(axes, curves, lengths)
