"""The commands of `python -m biased_flash_attn`."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from biased_flash_attn import backends, biases
from biased_flash_attn.backends import reference
from biased_flash_attn.cli import accuracy, main, text
from biased_flash_attn.cli.cost import CLEAR_REFS, cost
from biased_flash_attn.extrapolation import pictures
from biased_flash_attn.forms import Geometry
from biased_flash_attn.nn.named_biases import BIASES, make_bias

SMALL = ("demo", "--length", "160", "--heads", "2")


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Runs a command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(main, arguments)


def test_info_names_every_backend(invoke):
    result = succeeded(invoke("info"))
    for backend in backends.report():
        assert backend.name in result.output


@pytest.mark.parametrize("name", BIASES)
def test_plot_saves_a_picture(invoke, tmp_path, name):
    result = succeeded(invoke("plot", name, "--heads", "3", "--length", "40"))
    assert f"{name}.png" in result.output
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["alibi", "cable"])
@pytest.mark.parametrize("length", [40, 300])
def test_heat_map_is_the_mean_of_exp_of_the_bias(name, length):
    bias = make_bias(name, 2, 32)(torch.randn(1, length, 32))
    pairs = torch.from_numpy(pictures.weights(bias, length))
    n = min(length, pictures.MAPPED)
    with torch.no_grad():
        dense = bias.dense(length, length).reshape(2, length, length)[:, -n:, -n:]
    past = torch.ones(n, n).tril().bool()
    assert torch.equal(pairs.isnan(), ~past)
    torch.testing.assert_close(pairs[past], (dense[0].exp() + dense[1].exp())[past] / 2)


def test_plots_are_limited_to_biases_that_matter():
    logits = -np.arange(20_000.0)[None]
    figure = pictures.one_bias("deep", logits, np.eye(4))
    assert figure.axes[0].get_ylim() == (pictures.LOWEST, 1)


def test_plot_of_an_unknown_bias_lists_the_known_ones(invoke):
    result = invoke("plot", "rope")
    assert result.exit_code != 0
    for name in ("rope", *BIASES):
        assert name in result.output


def test_plot_without_matplotlib_says_what_to_install(tmp_path):
    script = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from biased_flash_attn.cli import main; main(['plot', 'alibi'])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True)
    assert done.returncode == 1
    assert b"pip install 'biased-flash-attn[plot]'" in done.stderr


def test_theory_covers_every_bias_of_positions(invoke, tmp_path):
    result = succeeded(invoke("theory", "--heads", "2", "--length", "50"))
    for name in biases.DISTANCE_BIASES:
        assert name in result.output
    for picture in ("curves", "heat_maps", "receptive_fields"):
        content = (tmp_path / "theory" / f"{picture}.png").read_bytes()
        assert content.startswith(b"\x89PNG")


def test_theory_reports_convergence(invoke):
    result = succeeded(invoke("theory", "type1", "inverse_distance", "--heads", "1"))
    judged = [line.split()[1] for line in result.output.splitlines() if line.startswith("   0")]
    assert judged == ["converges", "diverges"]
    assert "receptive field at 0.01: 61" in result.output
    assert "receptive field at 0.01: inf" in result.output


@pytest.mark.parametrize("name", ["cable", "rotary", "rope"])
def test_theory_refuses_biases_without_a_formula_of_the_distance(invoke, name):
    result = invoke("theory", name)
    assert result.exit_code == 2
    assert name in result.output
    assert "alibi" in result.output


def test_demo_finds_every_bias_exact(invoke, tmp_path):
    result = succeeded(invoke(*SMALL, "--dtype", random.choice(["float32", "bfloat16"])))
    for name in BIASES:
        assert name in result.output
    assert (tmp_path / "biases.png").exists()


@pytest.mark.slow
def test_demo_fails_if_a_result_is_wrong(invoke, monkeypatch):
    exact = accuracy.biased_flash_attn
    monkeypatch.setattr(accuracy, "biased_flash_attn", lambda *args: 1.001 * exact(*args))
    result = invoke(*SMALL)
    assert result.exit_code == 1
    assert "errors larger than tolerated: alibi" in result.output


@pytest.mark.parametrize("name", BIASES)
def test_sampled_exact_attention_equals_whole_attention(name):
    layer = text.embedded(text.library_source(50), 2, 16, torch.float64)
    module = make_bias(name, 2, 32).double()
    sample = accuracy.Sample(layer, n_queries=7)
    sampled = sample.exact(module, layer).values

    bias = module(layer.x).dense(50, 50)
    o, _ = reference.attention(layer.q, layer.k, layer.v, bias, Geometry(50, 50), 16**-0.5)
    o = o[:, :, sample.queries]
    torch.testing.assert_close(sampled["o"], o.detach())
    parameters = dict(module.named_parameters())
    leaves = {"q": layer.q, "k": layer.k, "v": layer.v, **parameters}
    gradients = torch.autograd.grad(o, leaves.values(), sample.grad)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(sampled[leaf], gradient)


@pytest.mark.parametrize("name", BIASES)
def test_errors_are_tolerated_at_a_length_that_shows_accumulated_rounding(name, seed):
    layer = text.embedded(text.library_source(1500), 4, 16, torch.float32)
    module = make_bias(name, 4, 64)
    sample = accuracy.Sample(layer)
    exact = sample.exact(module, layer)
    errors = accuracy.errors(sample.ours(module, layer), exact)
    tolerated = accuracy.tolerated(sample.naive(module, layer), exact, torch.float32)
    assert {x: e for x, e in errors.items() if e > tolerated[x]} == {}


def test_size_of_a_gradient_is_that_of_its_terms(seed):
    """Terms of opposite signs cancel: here entirely, because the bias is the same for all keys."""
    layer = text.embedded(text.library_source(40), 2, 16, torch.float64)
    exact = accuracy.Sample(layer).exact(make_bias("fire", 2, 32), layer)
    assert exact.values["bias.mlp.2.bias"].abs().max() < 1e-14
    assert exact.sizes["bias.mlp.2.bias"] > 0.1


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="this system does not tell peaks of memory")
def test_cost_excludes_earlier_memory():
    held = torch.ones(2**24)
    measured = cost(lambda: held + 1, repeats=2)
    assert measured.mebibytes == pytest.approx(64, abs=8)
    assert measured.seconds > 0


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="this system does not tell peaks of memory")
def test_cost_counts_the_memory_of_one_call():
    """Not what malloc kept of the call before, whether or not it takes that again."""
    kept = []
    measured = cost(lambda: kept.append(torch.ones(2**24)), repeats=2)
    assert len(kept) == 2
    assert measured.mebibytes == pytest.approx(64, abs=8)


def succeeded(result: Result) -> Result:
    assert result.exit_code == 0, result.output
    return result
