"""The plots of a synthetic task. Importing it needs matplotlib, an optional dependency."""

from __future__ import annotations

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
    _draw(left, settings, results, settings.eval_lengths, excess)
    if TASKS[settings.task].optimum_improves:
        right.set(ylim=(LEAST, 1.05), ylabel="share of the gain that is reached")
        for height in (0, 1):
            right.axhline(height, color="gray", linewidth=1)
        value = partial(reached, str(settings.train_length))
        _draw(right, settings, results, settings.eval_lengths[1:], value)
    else:
        right.set(ylim=(0, 1.05), ylabel="fraction of right predictions")
        _draw(right, settings, results, settings.eval_lengths, correct)
    return figure


def _draw(
    axes: Axes, settings: Settings, results: Results, lengths: tuple[int, ...], value: Callable
) -> None:
    axes.set(xscale="log", xlabel="context (tokens)")
    axes.set_xticks(lengths, map(str, lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.axvline(settings.train_length, color="gray", linestyle="--", linewidth=1)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    ends = {}
    for (scheme, models), style in zip(
        results.items(), styles(list(results)).values(), strict=True
    ):
        found = {n: x for n in lengths if (x := over_seeds(models, value, n)) is not None}
        means = [interval.mean for interval in found.values()]
        axes.plot(list(found), means, marker="o", markersize=3, **style)
        if found and len(models) > 1:
            low, high = zip(*((x.low, x.high) for x in found.values()), strict=True)
            axes.fill_between(list(found), low, high, color=style["color"], alpha=0.15, linewidth=0)
        if found:
            ends[scheme] = (list(found)[-1], means[-1], style["color"])
    label_ends(axes, ends)
