"""Tables of the papers beside those of small models."""

from __future__ import annotations

import math

import pytest
import torch
from click.testing import CliRunner

from biased_flash_attn.cli import main
from biased_flash_attn.cli.reproduce import TABLES
from biased_flash_attn.extrapolation import experiment
from biased_flash_attn.extrapolation.experiment import evaluation, presets, runner
from biased_flash_attn.extrapolation.formulas import formula_of
from biased_flash_attn.extrapolation.perplexity import segment_losses

from .tables import rows

TINY = experiment.Size(1, 16, 2, 2, 2, 1e-3, blocks=8, gradients=2)


def test_settings_are_those_of_the_papers_divided_by_8():
    (first,) = presets.PRESETS["chi-table-1"].experiments((0,))
    assert (first.train_length, first.eval_lengths) == (64, (64, 128, 256, 512, 1024))
    assert first.schemes[:2] == (
        "alibi(slopes='geometric', shift=-6)",
        "alibi(slopes='geometric', shift=-3)",
    )
    assert first.schemes[6:8] == ("alibi(exponent=-3)", "alibi(exponent=-1)")
    assert first.schemes[-2:] == ("window(20)", "window(40)")
    shifted, window = presets.PRESETS["chi-table-2"].experiments((0,))
    assert (shifted.train_length, shifted.eval_lengths) == (256, (256, 512, 1024))
    assert (window.train_length, window.eval_lengths) == (128, (128, 256, 512, 1024))
    (cached,) = presets.PRESETS["chi-table-5"].experiments((0,))
    assert (cached.cache, cached.eval_lengths) == (256, (64, 512, 1024, 2048))
    (cable,) = presets.PRESETS["cable-table-3"].experiments((0,))
    assert (cable.train_length, cable.eval_lengths[-1]) == (128, 1920)
    assert len(cable.schemes) == 9


@pytest.mark.parametrize(
    "scheme", ["alibi", "alibi(shift=2)", "alibi(exponent=4)", "alibi(slopes='geometric')"]
)
def test_slopes_are_the_same_for_the_same_fraction_of_the_training_length(scheme):
    d = torch.arange(100).double()
    ours, theirs = (formula_of(name, 4).bias for name in (presets.scaled(scheme), scheme))
    torch.testing.assert_close(ours.curve(d), theirs.curve(8 * d))


def test_a_sliding_cache_limits_the_keys_of_evaluation():
    files = tuple(torch.randint(256, (3, 60)).to(torch.uint8))
    text = experiment.Text(files[0], files, "random")
    these = experiment.Settings(("alibi",), 16, (16, 32), TINY, dtype="float32", cache=8)
    blocks = runner.blocks_of(these, text)
    found = evaluation.evaluate(these, blocks, runner.new_model(these, "alibi", 0))
    windowed = runner.new_model(these, "window(8)", 0)
    with torch.no_grad():
        bias = runner.new_model(these, "alibi", 0)
        for one, other in zip(bias.blocks, windowed.blocks, strict=True):
            one.attention.fused.window = other.attention.fused.window
    losses = segment_losses(bias, blocks.segments, 32, these.scored)
    assert found["nats"]["32"] == pytest.approx(evaluation.mean_by_file(losses, blocks.files))


MANY = {"chi-table-1", "cable-table-3"}  # models


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in MANY)) for name in TABLES]
)
def test_tables_show_the_paper_beside_what_was_measured(name, tmp_path, monkeypatch):
    monkeypatch.setattr(presets, "SIZE", TINY)
    random = torch.randint(32, 128, (2, 5000)).to(torch.uint8)
    text = experiment.Text(random[0], (random[0], random[1]), "random")
    monkeypatch.setattr(experiment, "read_text", lambda: text)
    done = CliRunner().invoke(main, ["reproduce", name, "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    table = (tmp_path / f"{name}.md").read_text()
    assert table in done.stdout
    cells = [row for row in rows(table) if row[0] != "paper"]
    preset = presets.PRESETS[name]
    assert [row[0] for row in cells] == [row.label for row in preset.rows()]
    for row, printed in zip(cells, preset.rows(), strict=True):
        lengths = sorted(n for n in printed.perplexity if n >= printed.train_length)
        if printed.scheme != "learned":
            quotient = printed.perplexity[lengths[-1]] / printed.perplexity[lengths[0]]
            theirs, ours, *_ = row[-1].split(" ")
            assert float(theirs.rstrip(",")) == pytest.approx(quotient, rel=0.01)
            assert math.isfinite(float(ours))
