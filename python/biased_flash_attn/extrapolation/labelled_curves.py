"""Pictures of measures, with curves that are labelled at their ends.

Importing this module needs matplotlib, an optional dependency.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from .measures import Measure, bounded, styles

GAP = 0.055  # of the height of the axes, between labels


def plot(axes: Axes, measure: Measure, lengths: Sequence[int]) -> None:
    """Draws the curve of each scheme against the length of the context, with ticks at `lengths`.

    Intervals that are unbounded are left out.
    """
    axes.set(xscale="log", yscale="log" if measure.logarithmic else "linear", xlabel="context")
    if measure.limits is not None:
        axes.set_ylim(measure.limits)
    for height in measure.marked:
        axes.axhline(height, color="gray", linewidth=1)
    ends = {}
    for name, style in styles(list(measure.curves)).items():
        curve = measure.curves[name]
        if not curve:
            continue
        means, low, high = zip(*curve.values(), strict=True)
        axes.plot(list(curve), means, marker="o", markersize=3, **style)
        if bounded(curve):
            band = {"color": style["color"], "alpha": 0.15, "linewidth": 0}
            axes.fill_between(list(curve), low, high, **band)
        ends[name] = (list(curve)[-1], means[-1], style["color"])
    if measure.logarithmic and axes.get_ylim()[0] < measure.floor:
        axes.set_ylim(bottom=measure.floor)
    axes.set_xticks(lengths, map(str, lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    label_ends(axes, ends)


def finish(axes: Axes, train_length: int) -> None:
    """Marks the training length."""
    axes.axvline(train_length, color="gray", linestyle="--", linewidth=1)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def label_ends(axes: Axes, lines: dict[str, tuple[float, float, str]]) -> None:
    """Writes the names of lines, with their last points and colors, to the right of the axes.

    The limits of the axes should be set before. Lines that end beyond them have an arrow.
    """
    low, high = axes.get_ylim()
    shown = {}
    for name, (x, y, color) in lines.items():
        arrow = "" if low <= y <= high else " ↓" if y < low else " ↑"
        shown[name + arrow] = (x, min(max(y, low), high), color)
    to_pixels, to_axes = axes.transData, axes.transAxes.inverted()
    heights = {
        name: to_axes.transform(to_pixels.transform((x, y)))[1] for name, (x, y, _) in shown.items()
    }
    order = sorted(shown, key=heights.__getitem__)
    places = spread([heights[name] for name in order])
    for name, place in zip(order, places, strict=True):
        x, y, color = shown[name]
        axes.annotate(
            name,
            (x, y),
            (1.03, place),
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=color,
            arrowprops={"arrowstyle": "-", "linewidth": 0.6, "color": color, "relpos": (0, 0.5)},
        )


def spread(heights: Sequence[float], gap: float = GAP) -> list[float]:
    """Ascending heights, moved as little as needed for a gap between neighbours.

    Neighbours that are too close form a group around the mean of their heights, as in isotonic
    regression.
    """
    groups: list[list[float]] = []  # heights without the gaps before them
    for place, height in enumerate(heights):
        groups.append([height - place * gap])
        while len(groups) > 1 and _mean(groups[-2]) >= _mean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    bare = [_mean(group) for group in groups for _ in group]
    return [height + place * gap for place, height in enumerate(bare)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
