"""The plots of a synthetic task. Importing it needs matplotlib, an optional dependency."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure

from ..labelled_curves import finish, plot
from ..tables import Interval
from ..training import Results
from .report import Value, correct, excess, over_seeds, reached
from .settings import TASKS, Settings

LEAST = -1.5  # share that is drawn


def draw(settings: Settings, results: Results) -> Figure:
    """Means and intervals over seeds, against the context."""
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    lengths = settings.eval_lengths
    left.set(yscale="log", ylabel="excess over the optimum (nats)")
    plot(left, _curves(results, lengths, excess), lengths)
    if TASKS[settings.task].optimum_improves:
        right.set(ylim=(LEAST, 1.05), ylabel="share of the gain that is reached")
        for height in (0, 1):
            right.axhline(height, color="gray", linewidth=1)
        share = partial(reached, str(settings.train_length))
        plot(right, _curves(results, lengths[1:], share), lengths)
    else:
        right.set(ylim=(0, 1.05), ylabel="fraction of right predictions")
        plot(right, _curves(results, lengths, correct), lengths)
    for axes in (left, right):
        finish(axes, settings.train_length)
    return figure


def _curves(
    results: Results, lengths: Sequence[int], value: Value
) -> dict[str, dict[int, Interval]]:
    """A value of each scheme at the lengths that its models reach."""
    return {
        scheme: {n: x for n in lengths if (x := over_seeds(models, value, n)) is not None}
        for scheme, models in results.items()
    }
