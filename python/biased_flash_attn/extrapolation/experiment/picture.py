"""The plots of an experiment. Importing it needs matplotlib, an optional dependency."""

from __future__ import annotations

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from .report import Results
from .settings import Settings

MARKERS = "osD^v<>P*Xph8d"


def draw(settings: Settings, results: Results) -> Figure:
    """Perplexity against context, and receptive fields of the series and of gradients."""
    figure = Figure(figsize=(15, 5), layout="constrained")
    perplexity, theory, gradient = figure.subplots(1, 3)
    colors = colormaps["turbo"](np.linspace(0.03, 0.97, len(results)))
    for n, (scheme, result) in enumerate(results.items()):
        style = {"color": colors[n], "marker": MARKERS[n % len(MARKERS)], "label": scheme}
        found = result["perplexity"]["sliding"]
        perplexity.plot(
            [int(length) for length in found], [x["perplexity"] for x in found.values()], **style
        )
        if result["theory"]:
            curve = result["theory"]
            theory.plot(curve["tokens"], curve["eps"], markevery=0.1, markersize=4, **style)
        if "gradient" in result:
            curve = result["gradient"]
            gradient.plot(curve["tokens"], curve["share"], markevery=0.1, markersize=4, **style)

    perplexity.set(title="perplexity of bytes", xlabel="context", xscale="log", yscale="log")
    perplexity.set_xticks(settings.eval_lengths, settings.eval_lengths)
    perplexity.minorticks_off()
    perplexity.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    perplexity.yaxis.set_major_formatter("{x:g}")
    theory.set(title="fraction of exp(bias) beyond", xlabel="distance", xscale="symlog")
    gradient.set(
        title="cumulative normalized gradient", xlabel="most recent tokens", ylim=(0, 1.02)
    )
    for axes in (perplexity, theory, gradient):
        _finish(axes, settings.train_length)
    figure.legend(*perplexity.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure


def _finish(axes: Axes, train_length: int) -> None:
    axes.axvline(train_length, color="gray", linestyle="--", linewidth=1)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
