"""The commands of `python -m biased_flash_attn`."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace

import pytest
import torch
from click.testing import Result

from biased_flash_attn import backends, biases
from biased_flash_attn.backends import reference
from biased_flash_attn.biases import NAMED, QUERY_BIASES
from biased_flash_attn.cli import accuracy, baselines, text
from biased_flash_attn.cli import cost as measuring
from biased_flash_attn.cli.cost import CLEAR_REFS, cost, resident
from biased_flash_attn.extrapolation import normalized_receptive_field, predict
from biased_flash_attn.extrapolation.prediction import HEADS
from biased_flash_attn.forms import Geometry
from biased_flash_attn.nn.named_biases import applied, make
from tests.project.test_docs import ROOT, assert_same_output

MEBIBYTE = 2**20
PREDICTIONS = ROOT / "bench" / "results" / "predictions"
SMALL = ("demo", "--length", "160", "--heads", "2")


def test_info_names_every_backend(invoke):
    result = succeeded(invoke("info"))
    for backend in backends.report():
        assert backend.name in result.output


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


def test_theory_prints_the_fits_of_every_head(invoke):
    fits = ["--fit", "9", "--fit", "50"]
    result = succeeded(invoke("theory", "inverse_distance", "--heads", "2", *fits))
    for points in (9, 50):
        shown = f"fit to the nearest {points}: " + ", ".join(["-1.000 log(1 + d)  (R^2 1.000)"] * 2)
        line = next(x for x in result.output.splitlines() if f"nearest {points}:" in x)
        assert line.replace("+0.000", "").replace("-0.000", "") == shown


def test_theory_draws_the_mean_of_the_heads_fields(pictures, invoke, monkeypatch):
    drawn = {}
    draw = pictures.receptive_fields
    monkeypatch.setattr(pictures, "receptive_fields", lambda x: drawn.update(x) or draw(x))
    succeeded(invoke("theory", "alibi(shift=2)", "--heads", "2", "--length", "64"))
    weights = biases.ALiBi(2, shift=2).curve(torch.arange(64).double()).exp()
    fields = [normalized_receptive_field(head)[0] for head in weights]
    assert fields[0].tolist() != fields[1].tolist()
    field, _ = drawn["alibi(shift=2)"]
    assert field.tolist() == ((fields[0] + fields[1]) / 2).tolist()


def test_predict_prints_and_draws(invoke, tmp_path):
    names = ["window(9)", "alibi(shift=2)", "kerple_log", "none"]
    options = ["--layers", "2", "--heads", "2", "--train-length", "16", "--eval-length", "64"]
    result = succeeded(invoke("predict", *names, *options))
    lines = {line.split("|")[1].strip(): line.split("|")[2:] for line in table_of(result)[2:]}
    assert list(lines) == names
    share = round(predict(None, 2, 16, 64, window=9), 3)
    assert [float(x) for x in lines["window(9)"][:4]] == [share] * 3 + [17]
    shown = [float(x) for x in lines["alibi(shift=2)"][:3]]
    bias = biases.ALiBi(2, shift=2)
    assert shown == [round(predict(bias, 2, 16, 64, heads=heads), 3) for heads in HEADS]
    assert lines["none"][3].strip() == "inf"
    assert (tmp_path / "predictions" / "predictions.png").read_bytes().startswith(b"\x89PNG")


def test_predictions_of_trainable_biases_do_not_depend_on_the_state_of_the_generator(invoke):
    tables = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        options = ["--heads", "2", "--train-length", "16", "--eval-length", "64"]
        tables.append(
            table_of(succeeded(invoke("predict", "kerple_log", "--layers", "1", *options)))
        )
    assert tables[0] == tables[1]


@pytest.mark.slow  # 42 variants on half of the rows, or seven predictors on all of them
@pytest.mark.parametrize(("options", "name"), [(["--choice"], "choice"), ([], "published")])
def test_comparisons_are_those_of_the_documentation(invoke, tmp_path, options, name):
    result = succeeded(invoke("published", *options, "--output", "here"))
    written = (tmp_path / "here" / f"{name}.md").read_text()
    assert written.strip() in result.stdout
    assert_same_output(written, (PREDICTIONS / f"{name}.md").read_text())
    assert (tmp_path / "here" / "published.png").exists() == (name == "published")


def table_of(result: Result) -> list[str]:
    return [line for line in result.stdout.splitlines() if line.startswith("|")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["cable"],
            "cable has no formula of the distance; these have one: none, window(WIDTH), alibi",
        ),
        (["rotary"], "rotary has no formula of the distance"),
        (["alibi(shft=4)"], "alibi takes the keyword arguments slopes, shift"),
        (["alibi(shift='far')"], "shift must be a number"),
        ([], "Missing argument 'SCHEME...'"),
        (["alibi", "--eval-length", "512"], "512 must be longer than that of training, 512"),
    ],
)
def test_predict_refuses(invoke, arguments, message):
    result = invoke("predict", *arguments)
    assert result.exit_code == 2
    # Messages are wrapped at the width of the terminal.
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    "name",
    ["fire", "cable", *QUERY_BIASES, "biased_flash_attn.biases:Shaw", "rotary", "rope", "none"],
)
def test_theory_refuses_biases_without_a_formula_of_the_distance(invoke, name):
    result = invoke("theory", name)
    assert result.exit_code == 2
    assert name in result.output
    assert "alibi" in result.output


@pytest.mark.slow
def test_demo_finds_every_bias_exact(invoke, tmp_path):
    result = succeeded(invoke(*SMALL, "--dtype", random.choice(["float32", "bfloat16"])))
    for name in NAMED:
        assert name in result.output
    assert (tmp_path / "biases.png").exists()


@pytest.mark.slow
def test_demo_fails_if_a_result_is_wrong(invoke, monkeypatch):
    exact = accuracy.biased_flash_attn
    monkeypatch.setattr(
        accuracy, "biased_flash_attn", lambda *args, **options: 1.001 * exact(*args, **options)
    )
    result = invoke(*SMALL)
    assert result.exit_code == 1
    assert "errors larger than tolerated: alibi" in result.output


@pytest.mark.parametrize("name", NAMED)
def test_sampled_exact_attention_equals_whole_attention(name):
    layer = text.embedded(text.library_source(50), 2, 16, torch.float64)
    module = make(NAMED[name], 2, 32).double()
    sample = accuracy.Sample(layer, n_queries=7)
    sampled = sample.exact(module, layer).values

    o = whole_attention(module, layer)[:, :, sample.queries]
    torch.testing.assert_close(sampled["o"], o.detach())
    leaves = accuracy.differentiated(module, layer)
    gradients = torch.autograd.grad(o, leaves.values(), sample.grad)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(sampled[leaf], gradient)


def whole_attention(module: biases.Bias, layer: text.Layer) -> torch.Tensor:
    """Naive attention of all queries at once, in float64."""
    q, bias, scale = applied(module, layer.x, layer.q, layer.k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    lengths = q.shape[2], layer.k.shape[2]
    dense, geometry = bias.dense(*lengths), Geometry(*lengths)
    return reference.attention(q, layer.k, layer.v, dense, geometry, scale)[0]


@pytest.mark.parametrize("name", NAMED)
def test_naive_attention_equals_the_reference(name):
    layer = text.embedded(text.library_source(60), 2, 16, torch.float64)
    module = larger(make(NAMED[name], 2, 32).double())
    for part in (layer, layer.ending_with(40)):
        found, exact = baselines.naive(module, part), whole_attention(module, part)
        # The matrices of biases are float32.
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


def larger(module: biases.Bias) -> biases.Bias:
    """With parameters unlike those at the start, some of which are too small to matter."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.rand_like(parameter))
    return module


@pytest.mark.parametrize("name", NAMED)
def test_errors_are_tolerated_at_a_length_that_shows_accumulated_rounding(name, seed):
    layer = text.embedded(text.library_source(1500), 4, 16, torch.float32)
    module = make(NAMED[name], 4, 64)
    sample = accuracy.Sample(layer)
    results = (compute(module, layer) for compute in (sample.ours, sample.naive, sample.exact))
    errors = accuracy.errors(*results, torch.float32)
    assert {name: pair for name, pair in errors.items() if pair[0] > pair[1]} == {}


def test_a_query_with_one_key_leaves_no_rounding_in_gradients(seed):
    layer = text.embedded(text.library_source(1), 8, 64, torch.float32)
    module, sample = biases.ALiBi(8), accuracy.Sample(layer)
    assert (sample.ours(module, layer)["k"] == 0).all()


def test_size_of_a_gradient_is_that_of_its_terms(seed):
    """Terms of opposite signs cancel: here entirely, because the bias is the same for all keys."""
    layer = text.embedded(text.library_source(40), 2, 16, torch.float64)
    exact = accuracy.Sample(layer).exact(biases.FIRE(2), layer)
    assert exact.values["bias.mlp.2.bias"].abs().max() < 1e-14
    assert exact.magnitudes["bias.mlp.2.bias"].max() > 0.1


class Memory:
    """Stands in for /proc/self, and for the memory of a process."""

    def __init__(self, monkeypatch):
        self.fields = {"VmRSS": 300 * MEBIBYTE, "VmHWM": 900 * MEBIBYTE}
        monkeypatch.setattr(measuring, "CLEAR_REFS", self)
        monkeypatch.setattr(measuring, "resident", self.fields.get)

    def __fspath__(self) -> str:
        return os.devnull

    def write_text(self, text: str) -> None:
        assert text == "5"
        self.fields["VmHWM"] = self.fields["VmRSS"]

    def take(self, n: int) -> None:
        self.fields["VmRSS"] += n
        self.fields["VmHWM"] = max(self.fields.values())


def test_cost_excludes_earlier_memory(monkeypatch):
    memory = Memory(monkeypatch)

    def call():
        memory.take(64 * MEBIBYTE)
        memory.take(-64 * MEBIBYTE)

    assert cost(call, repeats=2).mebibytes == 64
    assert cost(call, held=3 * MEBIBYTE).mebibytes == 67


def test_cost_counts_the_memory_of_one_call(monkeypatch):
    """Not what malloc kept of the call before, whether or not it takes that again."""
    memory = Memory(monkeypatch)
    assert cost(lambda: memory.take(64 * MEBIBYTE), repeats=2).mebibytes == 64


def test_cost_has_the_median_time(monkeypatch):
    times = iter([1.0, 10.0, 20.0, 22.0, 30.0, 33.0])  # a first call is slow
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    assert cost(lambda: None, repeats=3).seconds == 3


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="this system does not tell peaks of memory")
def test_peaks_of_resident_memory_are_told():
    held = torch.ones(2**24)
    assert resident("VmHWM") >= held.nbytes


def succeeded(result: Result) -> Result:
    assert result.exit_code == 0, result.output
    return result
