"""The plots of a synthetic task. Importing it needs matplotlib, an optional dependency."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from ..direct_labels import label_ends, styles
from ..training import Results
from .report import correct, excess, over_seeds, reached
from .settings import TASKS, Settings

LEAST = -1.5  # share that is drawn


def draw(settings: Settings, results: Results) -> Figure:
    """Means and intervals over seeds, against the context."""
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.set(yscale="log", ylabel="excess over the optimum (nats)")
    _draw(left, settings, results, excess)
    if TASKS[settings.task].optimum_improves:
        right.set(ylim=(LEAST, 1.05), ylabel="share of the gain that is reached")
        for height in (0, 1):
            right.axhline(height, color="gray", linewidth=1)
        _draw(right, settings, results, partial(reached, str(settings.train_length)), 1)
    else:
        right.set(ylim=(0, 1.05), ylabel="fraction of right predictions")
        _draw(right, settings, results, correct)
    return figure


def _draw(
    axes: Axes, settings: Settings, results: Results, value: Callable, first: int = 0
) -> None:
    """Draws a value from the length with number `first` on."""
    ends, lengths, lowest = {}, settings.eval_lengths, math.inf
    for (scheme, models), style in zip(
        results.items(), styles(list(results)).values(), strict=True
    ):
        found = {n: x for n in lengths[first:] if (x := over_seeds(models, value, n)) is not None}
        if not found:
            continue
        means, low, high = zip(*found.values(), strict=True)
        axes.plot(list(found), means, marker="o", markersize=3, **style)
        if len(models) > 1:
            band = {"color": style["color"], "alpha": 0.15, "linewidth": 0}
            axes.fill_between(list(found), low, high, **band)
        ends[scheme] = (list(found)[-1], means[-1], style["color"])
        lowest = min(lowest, *means)
    if axes.get_yscale() == "log" and 0 < lowest < math.inf:
        axes.set_ylim(bottom=lowest / 2)  # whatever the intervals
    axes.set(xscale="log", xlabel="context (tokens)")
    axes.set_xticks(lengths, map(str, lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.axvline(settings.train_length, color="gray", linestyle="--", linewidth=1)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    label_ends(axes, ends)
