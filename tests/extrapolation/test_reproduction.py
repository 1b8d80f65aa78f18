"""Tables and figures of the papers beside those of small models."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from click.testing import CliRunner

from biased_flash_attn.cli import main
from biased_flash_attn.cli.reproduce import NAMES
from biased_flash_attn.extrapolation import experiment
from biased_flash_attn.extrapolation.experiment import evaluation, report
from biased_flash_attn.extrapolation.formulas import formula_of
from biased_flash_attn.extrapolation.reproduction import (
    PRESETS,
    perplexities,
    preset,
    quotients,
    receptive_fields,
    retrieval,
)
from biased_flash_attn.nn import CausalLM, positions

from .tables import rows

SIZE = experiment.Size(2, 16, 2, 2, 2, 1e-3, blocks=8, gradients=2)


def test_settings_are_those_of_the_papers_divided_by_8():
    (first,) = PRESETS["chi-table-1"].experiments((0,))
    assert (first.train_length, first.eval_lengths) == (64, (64, 128, 256, 512, 1024))
    assert first.schemes[:2] == (
        "alibi(slopes='geometric', shift=-6)",
        "alibi(slopes='geometric', shift=-3)",
    )
    assert first.schemes[6:8] == ("alibi(exponent=-3)", "alibi(exponent=-1)")
    assert first.schemes[-2:] == ("window(21)", "window(41)")
    assert first.size.layers == 12
    shifted, window = PRESETS["chi-table-2"].experiments((0,))
    assert (shifted.train_length, shifted.eval_lengths) == (256, (256, 512, 1024))
    assert (window.train_length, window.eval_lengths) == (128, (128, 256, 512, 1024))
    (cached,) = PRESETS["chi-table-5"].experiments((0,))
    assert (cached.cache, cached.eval_lengths) == (256, (64, 512, 1024, 2048))
    (cable,) = PRESETS["cable-table-3"].experiments((0,))
    assert (cable.train_length, cable.eval_lengths[-1]) == (128, 1920)
    assert len(cable.schemes) == 9
    assert "clipped_table(max_distance=16)" in cable.schemes
    (figure,) = PRESETS["qin-figure-6"].experiments((0,))
    assert (figure.size.layers, figure.train_length, figure.eval_lengths) == (6, 512, (512,))
    assert figure.schemes == ("alibi", "kerple_log", "kerple_power", "sandwich", "type1", "type2")


@pytest.mark.parametrize(
    "scheme",
    ["alibi", "alibi(shift=2)", "alibi(exponent=4, trainable=True)", "alibi(slopes='geometric')"],
)
@torch.no_grad()
def test_slopes_are_the_same_for_the_same_fraction_of_the_training_length(scheme):
    d = torch.arange(100).double()
    ours, theirs = (formula_of(name, 4).bias for name in (preset.scaled(scheme), scheme))
    torch.testing.assert_close(ours.curve(d), theirs.curve(8 * d))
    assert any(True for _ in ours.parameters()) == ("trainable" in scheme)


@torch.no_grad()
def test_fire_is_the_same_function_of_the_fraction_of_the_training_length():
    ours, theirs = (_fire(name) for name in (preset.scaled("fire"), "fire"))
    torch.testing.assert_close(ours.dense(60, 60)[:, 59], theirs.dense(473, 473)[:, 472, ::8])


def _fire(scheme: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return positions(scheme).bias(4, 256)


def test_windows_reach_as_far_relative_to_the_training_length():
    widths = (40, 80, 100, 120, 160, 320)
    found = [positions(preset.scaled(f"window({width})")).window for width in widths]
    assert found == [6, 11, 13, 16, 21, 41]
    assert preset.scaled("window(1)") == "window(1)"


@pytest.mark.parametrize("scheme", ["alibi", "rotary", "window(3)", "window(30)"])
@torch.no_grad()
def test_a_sliding_cache_is_that_of_decoding_token_by_token(scheme):
    keys, tokens = 8, torch.randint(256, (1, 40))
    torch.manual_seed(0)
    model = CausalLM(256, 16, 2, 2, scheme)
    whole = model(tokens)
    with evaluation.sliding_cache(model, keys):
        found = model(tokens)
    assert torch.equal(model(tokens), whole), "the model is as before"
    for block in model.blocks:
        block.attention.window = min(keys, block.attention.window or keys)
    caches = model.make_caches(1)
    decoded = torch.cat([model(token, caches) for token in tokens.split(1, 1)], 1)
    torch.testing.assert_close(found, decoded, atol=1e-5, rtol=1e-5)
    assert torch.allclose(found, whole, atol=1e-5) == (scheme == "window(3)")


def nats_of(lengths: Sequence[int], perplexities: Sequence[float]) -> dict[str, list[float]]:
    """The losses of two files, at as many lengths as there are perplexities."""
    return {
        str(length): [math.log(x)] * 2 for length, x in zip(lengths, perplexities, strict=False)
    }


def test_tables_have_quotients_of_the_paper_and_of_what_was_measured():
    table = PRESETS["chi-table-5"]
    (settings,) = table.experiments((0,))
    sandwich, alibi = settings.schemes
    perplexities = {sandwich: (5, 3, 6, 3), alibi: (5, 4, 4, 8)}
    results = {
        scheme: {0: {"seconds": 90, "nats": nats_of(settings.eval_lengths, values)}}
        for scheme, values in perplexities.items()
    }
    text = table.beside(settings, results, report.Reference("", 1, 1, [1, 1], [math.log(2)] * 2))
    assert rows(text) == [
        [
            "scheme",
            "512 / counts",
            "4096 / that of Sandwich",
            "4096 / 512",
            "8192 / 4096",
            "16384 / 4096",
            "predicted",
        ],
        ["paper: Sandwich", "-", "1.00", "-", "1.01", "1.01", "-"],
        [
            f"here: {sandwich}",
            "2.500 [2.500, 2.500]",
            "1.000 [1.000, 1.000]",
            "0.600 [0.600, 0.600]",
            "2.000 [2.000, 2.000]",
            "1.000 [1.000, 1.000]",
            "0.752",
        ],
        ["paper: ALiBi", "-", "1.05", "-", "1.00", "1.00", "-"],
        [
            f"here: {alibi}",
            "2.500 [2.500, 2.500]",
            "1.333 [1.333, 1.333]",
            "0.800 [0.800, 0.800]",
            "1.000 [1.000, 1.000]",
            "2.000 [2.000, 2.000]",
            "0.724",
        ],
    ]
    assert "12 layers, 12 heads, trained at 512 tokens" in text
    assert "With a sliding cache of 2048 tokens. Here: " in text
    assert "trained at 64 bytes for 1000 steps of 64 sequences; 1 seed. Training took 3" in text
    assert "Brackets are 95% intervals from the variance over files, by bootstrap." in text
    assert "Perplexity at 64 bytes: 5; of counts that know the 3 bytes before: 2." in text
    assert "Rank correlation" not in text


def test_tables_have_the_rank_correlation_of_schemes_that_differ_in_the_paper():
    table = PRESETS["chi-table-1"]
    longest = {
        preset.scaled(row.scheme): row.perplexity[512] / row.perplexity[8192]
        for row in table.rows()
    }
    found = "Rank correlation of 8192 / 512 here and in the paper: -1.00, of 15"
    ending = "schemes whose numbers in the paper differ (of equal ones, the first)."
    assert f"{found} {ending}" in with_last_quotients(table, longest)


def test_tables_have_the_rank_correlation_with_predictions():
    table = PRESETS["chi-table-1"]
    (settings,) = table.experiments((0,))
    longest = {name: 1 + round(report.predicted(settings, name), 3) for name in settings.schemes}
    found = "Rank correlation of 8192 / 512 here and what `predict` says: 1.00, of 17"
    assert f"{found} schemes." in with_last_quotients(table, longest)


def with_last_quotients(table: preset.Preset, quotients: dict[str, float]) -> str:
    """The table of models of which the perplexity changes at the longest length only."""
    (settings,) = table.experiments((0,))
    lengths = settings.eval_lengths
    results = {
        scheme: {0: {"seconds": 1, "nats": nats_of(lengths, [2] * (len(lengths) - 1) + [2 * x])}}
        for scheme, x in quotients.items()
    }
    return table.beside(settings, results, report.Reference("", 1, 1, [1, 1], [1.0, 1.0]))


def test_models_without_values_at_a_length_have_dashes_there():
    printed = [
        quotients.Printed("short", "learned", {512: 4.0}),
        quotients.Printed("long", "rotary", {1024: 6.0}),
    ]
    results = {
        "learned": {0: {"nats": nats_of((64,), (2,))}},
        "rotary": {0: {"nats": nats_of((64, 128), (4, 8))}},
    }
    columns = quotients.quotients(
        printed, 512, results, report.Reference("", 1, 1, [1, 1], [math.log(4)] * 2)
    )
    assert rows(quotients.as_table(printed, columns)) == [
        ["scheme", "512 / counts", "512 / that of short", "1024 / 512"],
        ["paper: short", "-", "1.00", "-"],
        ["here: learned", "0.500 [0.500, 0.500]", "1.000 [1.000, 1.000]", "-"],
        ["paper: long", "-", "-", "-"],
        ["here: rotary", "1.000 [1.000, 1.000]", "2.000 [2.000, 2.000]", "2.000 [2.000, 2.000]"],
    ]


def test_encoders_are_compared_with_retrieval():
    table = PRESETS["cable-table-2"]
    (settings,) = table.experiments((0,))
    assert settings.objective == "masked"
    assert (settings.train_length, settings.eval_lengths[-1]) == (64, 2048)
    perplexities = dict.fromkeys(settings.schemes, (4, 4, 4, 4, 4, 4))
    perplexities["cable"], perplexities["learned"] = (2, 2, 2, 2, 2, 1), (8,)
    results = {
        scheme: {0: {"seconds": 90, "nats": nats_of(settings.eval_lengths, values)}}
        for scheme, values in perplexities.items()
    }
    text = table.beside(settings, results, report.Reference("", 1, 1, [1, 1], [math.log(4)] * 2))
    assert "Perplexity at 64 bytes: 2 to 8; of counts that know the 3 bytes before, even" in text
    header, *shown = rows(text)
    assert header[1:4] == ["512 / counts", "512 / that of CABLE", "1024 / 512"]
    assert shown[0][::7] == ["paper, nDCG@10: CABLE", "1.68"]
    assert shown[1][::7] == ["here, perplexity: cable", "0.500 [0.500, 0.500]"]
    assert ["paper, nDCG@10: Learnable", "-", "0.70", *["-"] * 5] in shown
    assert [
        "here, perplexity: learned",
        "2.000 [2.000, 2.000]",
        "4.000 [4.000, 4.000]",
        *["-"] * 5,
    ] in shown


def test_receptive_fields_are_compared_by_ranks():
    figure = PRESETS["qin-figure-6"]
    (settings,) = figure.experiments((0, 1))

    def measured(field: float) -> dict[str, object]:
        gradient = {"embedding": [-field, -field - 2], "blocks.4": [2 * field, 2 * field]}
        theory = {"tokens": [0, field, 512], "eps": [1, 0.01 + 1e-9, 0]}
        masses = {"blocks.0": [field, field + 1], "blocks.1": [field + 2, field + 3]}
        return {
            "seconds": 60,
            "nats": nats_of((512,), (5,)),
            "gradient": {"receptive_fields": gradient},
            "theory": theory,
            "attention_mass": masses,
        }

    results = {name: {0: measured(n), 1: measured(n + 2)} for n, name in enumerate(("a", "b", "c"))}
    last = results["c"][0]["attention_mass"]
    last["blocks.1"] = [x - 3 for x in last["blocks.1"]]  # the first seed of c is before b
    text = figure.beside(settings, results, report.Reference("", 1, 1, [1, 1], [1.0, 1.0]))
    header, first, *_ = rows(text)
    assert header[1:3] == ["TRF, series", "n_emp, attention"]
    assert first == ["a", "1 [0, 2]", "2 [2, 4]", "2 ± 0.0", "-2 ± 1.0"]
    assert "n_emp, attention 0.75 [0.50, 1.00]; gradient, last block 1.00 [1.00, 1.00]" in text
    assert "layers. Brackets are the least and the largest of the seeds." in text
    assert text.endswith("gradient, all blocks -1.00 [-1.00, -1.00].")
    assert "All fields hold 99%, at 512 bytes" in text


MANY = {"chi-table-1", "cable-table-3"}  # models


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in MANY)) for name in NAMES]
)
def test_command_writes_both_results(name, tmp_path, monkeypatch):
    for module in (perplexities, receptive_fields, retrieval):
        monkeypatch.setattr(module, "Size", lambda *_, **__: SIZE)
    random = torch.randint(32, 128, (2, 5000)).to(torch.uint8)
    text = experiment.Text(random[0], (random[0], random[1]), "random")
    monkeypatch.setattr(experiment, "read_text", lambda: text)
    done = CliRunner().invoke(main, ["reproduce", name, "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    written = (tmp_path / f"{name}.md").read_text()
    assert written in done.stdout
    schemes = [row[0] for row in rows(written) if not row[0].startswith(("paper", "scheme"))]
    experiments = PRESETS[name].experiments((0,))
    assert len(schemes) == sum(len(settings.schemes) for settings in experiments)
    for settings in experiments:
        folder = tmp_path / f"{name}-{settings.train_length}"
        written = {path.suffix for path in folder.glob("results.*")}
        assert written == {".html", ".json", ".png"}


def test_command_knows_all_presets_and_their_numbers_of_steps():
    assert set(NAMES) == set(PRESETS)
    steps = {settings.size.steps for p in PRESETS.values() for settings in p.experiments((0,))}
    assert steps == {1000, 2500}
    (of_encoders,) = PRESETS["cable-table-2"].experiments((0,))
    assert of_encoders.size.steps == 2500
    done = CliRunner().invoke(main, ["reproduce", "--help"])
    assert "[default: 1000; 2500 for" in done.output


def test_invalid_seeds_are_refused_before_any_training(tmp_path):
    arguments = ["reproduce", "chi-table-5", "--seeds", "1,1", "--output", str(tmp_path)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 1
    assert done.output == "Error: seeds is (1, 1); it must have one or more, each once\n"
