"""The plots of a synthetic task. Importing it needs matplotlib and plotly, which are optional."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from .. import interactive
from ..labelled_curves import finish, plot
from ..training import Results
from .report import description, measures
from .settings import Settings


def write(settings: Settings, results: Results, folder: Path) -> list[Path]:
    """Writes TASK.png and TASK.html; returns their paths."""
    paths = [folder / f"{settings.task}.png", folder / f"{settings.task}.html"]
    draw(settings, results).savefig(paths[0], dpi=120)
    paths[1].write_text(page(settings, results), encoding="utf-8")
    return paths


def draw(settings: Settings, results: Results) -> Figure:
    """Means and intervals over seeds, against the context."""
    found = measures(settings, results)
    figure = Figure(figsize=(6.5 * len(found), 5.5), layout="constrained")
    for axes, measure in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        axes.set(ylabel=measure.name)
        plot(axes, measure, settings.eval_lengths)
        finish(axes, settings.train_length)
    return figure


def page(settings: Settings, results: Results, library: str | bool = True) -> str:
    """The same as HTML, with a menu; `library` is as in `interactive.page`."""
    return interactive.page(
        f"Task {settings.task}",
        description(settings, results),
        measures(settings, results),
        settings.eval_lengths,
        settings.train_length,
        library,
    )
