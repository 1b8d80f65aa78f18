"""`plot`, and the figures that it draws."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from biased_flash_attn.biases import NAMED, QUERY_BIASES
from biased_flash_attn.cli.plot import HEAD_DIM, bias_of, random_layer
from biased_flash_attn.nn.named_biases import make
from tests.cli.test_commands import succeeded


@pytest.mark.parametrize("name", NAMED)
def test_plot_saves_a_picture(invoke, tmp_path, name):
    result = succeeded(invoke("plot", name, "--heads", "3", "--length", "40"))
    assert f"{name}.png; random parameters and contents are those of seed 0" in result.output
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("alibi(shift=6)", "alibi(shift=6).png"),
        ("tests.nn.test_modules:Gate", "Gate.png"),
        ("biased_flash_attn.biases:Shaw", "new/folder/shaw.png"),
    ],
)
def test_plot_takes_arguments_classes_and_folders(invoke, tmp_path, name, output):
    options = ["--output", output] if "/" in output else []
    succeeded(invoke("plot", name, "--heads", "2", "--length", "20", *options))
    assert (tmp_path / output).exists()


@pytest.mark.parametrize("name", ["alibi", "cable"])
@pytest.mark.parametrize("length", [40, 300])
def test_heat_map_is_the_mean_of_exp_of_the_bias(pictures, name, length):
    bias = make(NAMED[name], 2, 32)(torch.randn(1, length, 32))
    pairs = torch.from_numpy(pictures.weights(bias, length))
    n = min(length, pictures.MAPPED)
    with torch.no_grad():
        dense = bias.dense(length, length).reshape(2, length, length)[:, -n:, -n:]
    past = torch.ones(n, n).tril().bool()
    assert torch.equal(pairs.isnan(), ~past)
    torch.testing.assert_close(pairs[past], (dense[0].exp() + dense[1].exp())[past] / 2)


def test_plots_are_limited_to_biases_that_matter(pictures):
    logits = -np.arange(20_000.0)[None]
    figure = pictures.one_bias("deep", logits, np.eye(4))
    assert figure.axes[0].get_ylim() == (pictures.LOWEST, 1)


@pytest.mark.parametrize("heads", [1, 2])
def test_colours_of_several_heads_are_explained_beside_the_curves(pictures, heads):
    figure = pictures.one_bias("alike", np.zeros((heads, 4)), np.eye(4))
    figure.draw_without_rendering()
    left_to_right = sorted(figure.axes, key=lambda axes: axes.get_position().x0)
    labels = [axes.get_xlabel() or axes.get_ylabel() for axes in left_to_right]
    of_heads = ["head"] if heads > 1 else []
    assert labels == ["distance d", "d + 1", *of_heads, "key", "exp(b), mean of the heads"]


@pytest.mark.parametrize("name", QUERY_BIASES)
@pytest.mark.parametrize("length", [40, 300])
def test_rows_are_those_of_the_last_queries(pictures, name, length):
    module, layer = make(NAMED[name], 2, 2 * HEAD_DIM), random_layer(2, length)
    last = bias_of(module, layer, min(length, pictures.MAPPED))
    with torch.no_grad():
        dense = bias_of(module, layer, length).dense(length, length)
    exact = dense.expand(1, 2, -1, -1)[0, 0, -pictures.MAPPED :]
    torch.testing.assert_close(torch.from_numpy(pictures.rows(last, length)), exact)


def test_curves_of_queries_are_drawn_by_distance(pictures):
    position, key = np.arange(200, 300)[:, None], np.arange(300)
    logits = 1000.0 * position + (position - key)
    past, near, heat, _ = pictures.query_dependent_bias("made up", logits).axes
    assert len(past.lines) == len(near.lines) == pictures.QUERIES
    for shift, axes in ((1, past), (0, near)):
        for line in axes.lines:
            of_query = 1000 * int(line.get_label().removeprefix("query "))
            assert np.array_equal(line.get_ydata(), of_query + line.get_xdata() - shift)
            assert min(line.get_xdata()) == 1 or axes is near
    size = 2 * pictures.NEAR
    assert np.array_equal(heat.images[0].get_array(), logits[-size:, -size:])
    assert heat.images[0].get_extent() == [299.5 - size, 299.5, 299.5, 299.5 - size]


def test_plot_of_an_unknown_bias_lists_the_known_ones(invoke):
    result = invoke("plot", "rope")
    assert result.exit_code == 2
    for name in ("rope", *NAMED):
        assert name in result.output
    result = invoke("plot", "rotary")
    assert result.exit_code == 2
    assert "rotary has no bias to draw" in result.output


def test_plot_without_matplotlib_says_what_to_install(tmp_path):
    script = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from biased_flash_attn.cli import main; main(['plot', 'alibi'])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True)
    assert done.returncode == 1
    assert b"pip install 'biased-flash-attn[plot]'" in done.stderr
