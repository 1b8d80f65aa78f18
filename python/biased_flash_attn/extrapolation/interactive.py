"""Pages with a plot that answers to clicks. Importing it needs plotly, an optional dependency."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from plotly import graph_objects

from .measures import Curve, Measure, bounded, styles
from .tables import shown

DASHES = {"-": "solid", "--": "dash", ":": "dot"}
FONT = 14
MARGIN = 1.2  # beyond the first and the last context, as a factor
HINT = (
    "Bands show the intervals. A click on a scheme below hides it, and a double click hides the"
    " others. A double click on the plot shows what lies outside of it."
)
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 1rem/1.45 system-ui, sans-serif; max-width: 75rem; margin: auto; padding: 1rem; }}
h1 {{ font-size: 1.4rem; margin: 0; }}
p {{ margin: 0.5rem 0 1rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{text}</p>
{plot}
</body>
</html>
"""


def page(
    title: str,
    description: str,
    measures: Sequence[Measure],
    lengths: Sequence[int],
    train_length: int,
    library: str | bool = True,
) -> str:
    """An HTML page of one of the measures, with a menu of all of them.

    It needs no other file, unless `library` is the address of plotly.js.
    """
    plot = figure(measures, lengths, train_length).to_html(
        config={"responsive": True, "displayModeBar": False, "showTips": False},
        full_html=False,
        include_plotlyjs=library,
        default_height="36rem",
        div_id="plot",  # which is random by default
    )
    text = html.escape(f"{description} {HINT}")
    return PAGE.format(title=html.escape(title), text=text, plot=plot)


def figure(
    measures: Sequence[Measure], lengths: Sequence[int], train_length: int
) -> graph_objects.Figure:
    """The first measure. The menu replaces values, so that schemes that are hidden remain so."""
    entries = [
        {
            "label": measure.name,
            "method": "update",
            "args": [_values(measure), _layout(measure, train_length)],
        }
        for measure in measures
    ]
    values, layout = entries[0]["args"]
    data = [
        {**trace, **{name: of[place] for name, of in values.items()}}
        for place, trace in enumerate(_traces(list(measures[0].curves)))
    ]
    ends = min(*lengths, train_length) / MARGIN, max(*lengths, train_length) * MARGIN
    common = {
        "template": "plotly_white",
        "font": {"size": FONT},
        "xaxis": {
            "type": "log",
            "range": [math.log10(end) for end in ends],
            "title": {"text": "context (dashed line: in training)", "font": {"size": FONT}},
            "tickvals": lengths,
            "ticktext": lengths,
            "autotickangles": [0, -90],
        },
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"},
        "margin": {"l": 10, "r": 10, "t": 48, "b": 10},
        "updatemenus": [
            {"buttons": entries, "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}
        ],
    }
    return graph_objects.Figure(data, {**layout, **common})


def _traces(names: Sequence[str]) -> list[dict[str, object]]:
    """Of each scheme a line and a band without values."""
    traces = []
    for name, style in styles(names).items():
        shared = {"name": name, "legendgroup": name}
        line = {"color": style["color"], "dash": DASHES[style["linestyle"]]}
        traces.append({**shared, "mode": "lines+markers", "line": line, "hoverinfo": "text"})
        band = {"mode": "none", "fill": "toself", "fillcolor": style["color"], "opacity": 0.15}
        traces.append({**shared, **band, "hoverinfo": "skip", "showlegend": False})
    return traces


def _values(measure: Measure) -> dict[str, list[list]]:
    """The values of all traces."""
    floor = measure.floor if measure.logarithmic else -math.inf
    traces = []
    for name, curve in measure.curves.items():
        traces += [_line(name, curve), _band(curve, floor)]
    return {key: [trace.get(key, []) for trace in traces] for key in ("x", "y", "hovertext")}


def _line(name: str, curve: Curve) -> dict[str, list]:
    return {
        "x": list(curve),
        "y": [interval.mean for interval in curve.values()],
        "hovertext": [f"{name} at {n}<br>{shown(interval, 4)}" for n, interval in curve.items()],
    }


def _band(curve: Curve, floor: float) -> dict[str, list]:
    """The corners, if there are any."""
    if not bounded(curve):
        return {}
    points = [(n, interval.high) for n, interval in curve.items()]
    points += reversed([(n, max(interval.low, floor)) for n, interval in curve.items()])
    return {"x": [x for x, _ in points], "y": [y for _, y in points]}


def _layout(measure: Measure, train_length: int) -> dict[str, object]:
    """The vertical axis and the lines."""
    if measure.logarithmic:
        # With more ticks, plotly draws labels over each other.
        ticks = {"nticks": 5, "minorloglabels": "complete"}
        axis = {"type": "log", "autorangeoptions": {"clipmin": measure.floor}, **ticks}
        if measure.limits is not None:
            axis["range"] = [math.log10(end) for end in measure.limits]
    else:
        axis = {"type": "linear", "range": measure.limits}
    gray = {"color": "gray", "width": 1}
    shapes = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": gray}
        for y in measure.marked
    ]
    of_training = {"yref": "paper", "y0": 0, "y1": 1, "x0": train_length, "x1": train_length}
    shapes.append({"type": "line", **of_training, "line": {**gray, "dash": "dash"}})
    return {"yaxis": axis, "shapes": shapes}
