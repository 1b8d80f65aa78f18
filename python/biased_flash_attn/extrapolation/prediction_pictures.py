"""Plots of predictions from formulas. Importing this module needs matplotlib, an optional
dependency."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from .comparison import CHOICE, HELD_OUT, Comparison, by_model, predicted

# Gray, and the blue of Okabe and Ito (2008): people with any color vision can distinguish them.
COLORS = {CHOICE: "#595959", HELD_OUT: "#0072B2"}
LABELS = {CHOICE: "for the choice of the variant", HELD_OUT: "held out"}
MARKERS = "os^Dv<>"
FEWEST_BARS = 5  # for which a picture has space
LARGE = 0.9  # predictions whose points are close to each other


def of_schemes(curves: dict[str, Tensor], train_length: int) -> Figure:
    """The fraction beyond the training length per scheme, and beyond each distance.

    curves: `information` of each scheme, (heads, length).
    """
    figure = Figure(figsize=(12, 1.5 + max(3, 0.4 * len(curves))), layout="constrained")
    bars, lines = figure.subplots(1, 2)
    for place, (name, curve) in enumerate(curves.items()):
        beyond = curve[:, train_length:].sum(1)
        bars.barh(place, beyond.mean().item(), color=f"C{place % 10}")
        bars.plot(beyond.tolist(), [place] * len(beyond), "|", color="black")
        after = curve.mean(0).flip(0).cumsum(0).flip(0)
        lines.plot(after.numpy(), color=f"C{place % 10}", label=name)
    bars.set_yticks(range(len(curves)), list(curves))
    bars.set_ylim(max(len(curves), FEWEST_BARS) - 0.5, -0.5)
    bars.set(xlabel="fraction beyond the training length: mean of the heads, | every head")
    bars.set(xlim=(0, 1.02))
    lines.axvline(train_length, color="gray", linestyle="--", linewidth=1)
    lines.set(xscale="symlog", xlim=(0, None), ylim=(0, 1.02))
    lines.set(xlabel="distance", ylabel="fraction from there on, mean of the heads")
    lines.legend(fontsize=8)
    for axes in (bars, lines):
        _finish(axes)
    return figure


def against_published(found: list[Comparison]) -> Figure:
    """What the papers measured against the prediction, one label per model.

    A model that was measured on several texts has a point for each of them, on a vertical line.
    Labels of large predictions are on the right, the others above.
    """
    models = by_model(found)
    figure = Figure(figsize=(13, 8), layout="constrained")
    axes = figure.subplots()
    texts = list(dict.fromkeys(x.row.dataset for x in found))
    markers = dict(zip(texts, MARKERS, strict=False))
    for same in models:
        x, color = predicted(same[0]), COLORS[same[0].part]
        ratios = [math.exp(c.loss) for c in same]
        axes.plot([x, x], [min(ratios), max(ratios)], color=color, linewidth=1)
        for comparison, ratio in zip(same, ratios, strict=True):
            style = {"marker": markers[comparison.row.dataset], "color": color, "linestyle": ""}
            axes.plot(x, ratio, markersize=5, alpha=0.8, **style)
    axes.set(xlim=(-0.02, 1.02), yscale="log")
    _label(axes, sorted((m for m in models if predicted(m[0]) > LARGE), key=_height), "right")
    _label(axes, sorted((m for m in models if predicted(m[0]) <= LARGE), key=_place), "above")
    for part, label in LABELS.items():
        axes.plot([], [], "s", color=COLORS[part], label=label)
    for text, marker in markers.items():
        axes.plot([], [], marker, color="black", linestyle="", label=text)
    axes.axhline(1, color="gray", linestyle="--", linewidth=1)
    axes.set_yticks([0.9, 1, 1.2, 1.5, 2, 3, 5, 10, 20, 30])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set(xlabel="predicted: fraction of the information from beyond the training length")
    axes.set(ylabel="measured: perplexity at the longest / at the training length")
    axes.legend(fontsize=8, loc="upper left", ncols=2)
    _finish(axes)
    return figure


def _label(axes: Axes, models: list[list[Comparison]], side: str) -> None:
    """Labels in the given order at equal distances, with a line to the mean of each model."""
    right = side == "right"
    line = {"arrowstyle": "-", "linewidth": 0.4, "alpha": 0.6}
    line["relpos"] = (0, 0.5) if right else (0.5, 0)
    for same, place in zip(models, np.linspace(0.02, 0.98, len(models)), strict=True):
        color = COLORS[same[0].part]
        axes.annotate(
            _name(same[0]),
            (predicted(same[0]), math.exp(_height(same))),
            (1.04, place) if right else (0.8 * place, 0.27),
            textcoords="axes fraction",
            va="center" if right else "bottom",
            ha="left" if right else "center",
            rotation=0 if right else 90,
            fontsize=7.5,
            color=color,
            arrowprops=line | {"color": color},
        )


def _place(same: list[Comparison]) -> tuple[float, float]:
    """The prediction, and the mean of the texts' losses."""
    return predicted(same[0]), _height(same)


def _height(same: list[Comparison]) -> float:
    """The mean of the texts' losses."""
    return sum(x.loss for x in same) / len(same)


def _name(comparison: Comparison) -> str:
    """What the paper calls the scheme, and the setting."""
    row = comparison.row
    return f"{row.label} ({row.paper.split()[0]}, {row.layers} layers, {row.train_length})"


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
