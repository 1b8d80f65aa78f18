"""Pages with interactive plots: what they contain, and what their menus change."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser

import pytest
from plotly import graph_objects

from biased_flash_attn.extrapolation import interactive
from biased_flash_attn.extrapolation.measures import Measure, styles
from biased_flash_attn.extrapolation.tables import Interval

LOSSES = {
    "alibi": {16: Interval(0.3, 0.2, 0.4), 32: Interval(0.5, -0.1, 1.1)},
    "learned": {16: Interval(0.25, -math.inf, math.inf)},
    "a<b": {16: Interval(0.7, 0.6, 0.8), 32: Interval(0.9, 0.8, 1.0)},
}
SHARES = {
    "alibi": {32: Interval(0.75, 0.625, 0.875)},
    "learned": {},
    "a<b": {32: Interval(-9, -10, -8)},
}
MEASURES = [
    Measure("loss", LOSSES, logarithmic=True),
    Measure("share", SHARES, limits=(-1.5, 1), marked=(0,)),
]


class Loaded(HTMLParser):
    """The attributes of a page that make a browser load something, and its names of tags."""

    def __init__(self, page: str):
        super().__init__()
        self.addresses: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href")]


@pytest.fixture
def figure() -> graph_objects.Figure:
    return interactive.figure(MEASURES, (16, 32), 16)


def test_pages_hold_all_that_they_need():
    page = interactive.page("A < B", "Of 2 seeds.", MEASURES, (16, 32), 16)
    loaded = Loaded(page)
    assert loaded.addresses == []
    assert "link" not in loaded.tags
    assert "* plotly.js v" in page
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "<title>A &lt; B</title>" in page
    assert "<p>Of 2 seeds. Bands show" in page
    drawn = page.rpartition("Plotly.newPlot(")[2]
    data, _ = json.JSONDecoder().raw_decode(drawn, drawn.index("["))
    assert [trace["y"] for trace in data[::2]] == [[0.3, 0.5], [0.25], [0.7, 0.9]]


def test_pages_can_share_the_library():
    page = interactive.page("A", "B.", MEASURES, (16, 32), 16, "../plotly.min.js")
    assert Loaded(page).addresses == ["../plotly.min.js"]
    assert "* plotly.js v" not in page


def test_curves_have_the_styles_of_pictures_and_their_bands_follow_them(figure):
    for name, line, band in zip(LOSSES, figure.data[::2], figure.data[1::2], strict=True):
        style = styles(list(LOSSES))[name]
        assert line.name == band.name == line.legendgroup == band.legendgroup == name
        assert line.line.color == band.fillcolor == style["color"]
        assert line.line.dash == interactive.DASHES[style["linestyle"]]
        assert band.showlegend is False
        assert band.hoverinfo == "skip"


def test_points_tell_scheme_context_mean_and_interval(figure):
    assert figure.data[0].hovertext == (
        "alibi at 16<br>0.3000 [0.2000, 0.4000]",
        "alibi at 32<br>0.5000 [-0.1000, 1.1000]",
    )
    assert figure.data[2].hovertext == ("learned at 16<br>0.2500",)


def test_bands_are_intervals_and_unbounded_ones_are_left_out(figure):
    alibi, learned, other = figure.data[1::2]
    assert other.x == (16, 32, 32, 16)
    assert other.y == (0.8, 1.0, 0.8, 0.6)
    assert learned.x == learned.y == ()
    # A logarithmic axis has no place for -0.1; it ends at half of the lowest mean.
    assert alibi.y == (0.4, 1.1, 0.125, 0.2)
    assert figure.layout.yaxis.autorangeoptions.clipmin == 0.125


def test_limits_of_logarithmic_axes_are_exponents():
    measure = Measure("loss", LOSSES, logarithmic=True, limits=(0.1, 10))
    assert interactive.figure([measure], (16, 32), 16).layout.yaxis.range == (-1, 1)


def test_menus_replace_the_measure_and_keep_hidden_schemes(figure):
    (menu,) = figure.layout.updatemenus
    assert [button.label for button in menu.buttons] == ["loss", "share"]
    first, second = (button.args for button in menu.buttons)
    assert set(first[0]) == set(second[0]) == {"x", "y", "hovertext"}
    for name in first[0]:
        assert [list(trace[name] or []) for trace in figure.data] == first[0][name]
    assert second[0]["x"] == [[32], [32, 32], [], [], [32], [32, 32]]
    assert second[0]["y"] == [[0.75], [0.875, 0.625], [], [], [-9], [-8, -10]]
    assert first[1]["yaxis"]["type"] == figure.layout.yaxis.type == "log"
    # What is far below is drawn, but beyond the axis.
    assert second[1]["yaxis"] == {"type": "linear", "range": (-1.5, 1)}


def test_lines_mark_the_training_length_and_heights(figure):
    (training,) = figure.layout.shapes
    assert (training.x0, training.x1, training.yref) == (16, 16, "paper")
    zero, again = figure.layout.updatemenus[0].buttons[1].args[1]["shapes"]
    assert (zero["y0"], zero["y1"], zero["xref"]) == (0, 0, "paper")
    assert again["x0"] == 16
