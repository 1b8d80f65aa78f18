"""Plots of predictions from formulas. Importing this module needs matplotlib, an optional
dependency."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from .comparison import CHOICE, CHOSEN, HELD_OUT, OTHER, Comparison, by_model

# Of Okabe and Ito (2008), which people with any color vision can distinguish.
COLORS = {CHOICE: "#999999", HELD_OUT: "#0072B2", OTHER: "#D55E00"}
LABELS = {
    CHOICE: "on which the prediction was chosen",
    HELD_OUT: "held out",
    OTHER: "other tables",
}
MARKERS = "os^Dv<>"
FEWEST = 1e-3  # below this fraction, the axis is linear


def of_schemes(curves: dict[str, Tensor], train_length: int) -> Figure:
    """The fraction beyond the training length per scheme, and beyond each distance.

    curves: `information` of each scheme, (heads, length).
    """
    figure = Figure(figsize=(12, 1.5 + max(3, 0.4 * len(curves))), layout="constrained")
    bars, lines = figure.subplots(1, 2)
    for place, (name, curve) in enumerate(curves.items()):
        beyond = curve[:, train_length:].sum(1)
        bars.barh(place, beyond.min().item(), color=f"C{place % 10}")
        bars.plot(beyond.tolist(), [place] * len(beyond), "|", color="black")
        after = curve.mean(0).flip(0).cumsum(0).flip(0)
        lines.plot(after.numpy(), color=f"C{place % 10}", label=name)
    bars.set_yticks(range(len(curves)), list(curves))
    bars.invert_yaxis()
    bars.set(xlabel="fraction beyond the training length: narrowest head, | every head")
    bars.set(xlim=(0, 1.02))
    lines.axvline(train_length, color="gray", linestyle="--", linewidth=1)
    lines.set(xscale="symlog", xlim=(0, None), ylim=(0, 1.02))
    lines.set(xlabel="distance", ylabel="fraction from there on, mean of the heads")
    lines.legend(fontsize=8)
    for axes in (bars, lines):
        _finish(axes)
    return figure


def against_published(found: list[Comparison]) -> Figure:
    """Predictions, and what the papers measured on each text, one line per model."""
    models = by_model(found)
    figure = Figure(figsize=(12, 1.5 + 0.22 * len(models)), layout="constrained")
    bars, dots = figure.subplots(1, 2, sharey=True)
    texts = list(dict.fromkeys(x.row.dataset for x in found))
    markers = dict(zip(texts, MARKERS, strict=False))
    for place, same in enumerate(models):
        color = COLORS[same[0].part]
        bars.barh(place, same[0].predicted[CHOSEN], color=color, label=LABELS[same[0].part])
        for x in same:
            style = {"marker": markers[x.row.dataset], "color": color, "linestyle": ""}
            dots.plot(math.exp(x.loss), place, label=x.row.dataset, **style)
    bars.set_yticks(range(len(models)), [_name(same[0]) for same in models], fontsize=8)
    bars.invert_yaxis()
    bars.set_xscale("symlog", linthresh=FEWEST)
    bars.set(xlim=(0, 1), xlabel="predicted: fraction from beyond the training length")
    dots.set(xscale="log", xlabel="measured: perplexity at the longest / at the training length")
    dots.axvline(1, color="gray", linestyle="--", linewidth=1)
    for axes in (bars, dots):
        _finish(axes)
        handles, labels = axes.get_legend_handles_labels()
        first = dict(reversed(list(zip(labels, handles, strict=True))))
        axes.legend(list(first.values())[::-1], list(first)[::-1], fontsize=8)
    return figure


def _name(comparison: Comparison) -> str:
    row = comparison.row
    settings = f"{row.paper.split()[0]}, {row.layers} layers, {row.train_length}"
    return f"{row.scheme} ({settings})"


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
