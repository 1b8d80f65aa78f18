"""The plots of a synthetic task. Importing it needs matplotlib, an optional dependency."""

from __future__ import annotations

from matplotlib.figure import Figure

from ..labelled_curves import finish, plot
from ..training import Results
from .report import measures
from .settings import Settings


def draw(settings: Settings, results: Results) -> Figure:
    """Means and intervals over seeds, against the context."""
    found = measures(settings, results)
    figure = Figure(figsize=(6.5 * len(found), 5.5), layout="constrained")
    for axes, measure in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        axes.set(ylabel=measure.name)
        plot(axes, measure, settings.eval_lengths)
        finish(axes, settings.train_length)
    return figure
