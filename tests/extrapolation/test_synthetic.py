"""Experiments with synthetic tasks: training, evaluation, intervals, tables and the command."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from scipy import stats

from biased_flash_attn.cli import main
from biased_flash_attn.extrapolation import intervals, predict, synthetic
from biased_flash_attn.extrapolation.formulas import formula_of
from biased_flash_attn.extrapolation.synthetic import picture, report, runner
from biased_flash_attn.extrapolation.synthetic.settings import Size
from biased_flash_attn.extrapolation.tables import shown
from biased_flash_attn.extrapolation.training import CheckpointError, checkpoints
from biased_flash_attn.extrapolation.training.records import write_record
from tests.project.test_docs import DOCS, ROOT, assert_same_output

from .tables import rows

TINY = synthetic.Size(1, 16, 2, steps=6, batch=4, rate=1e-3, documents=5)
SETTINGS = synthetic.Settings("markov", ("alibi", "learned"), (0, 1), (16, 32), TINY)
PAGE = DOCS / "laboratory" / "tasks.md"
RESULTS = ROOT / "bench" / "results" / "synthetic"


def test_losses_are_those_of_the_scored_predictions(tmp_path):
    (found, _) = synthetic.run(SETTINGS, tmp_path)["alibi"].values()
    model = runner.new_model(SETTINGS, "alibi", 0)
    path = tmp_path / "markov" / "checkpoints" / "alibi-0.pt"
    identity = SETTINGS.identity("alibi", 0)
    model.load_state_dict(checkpoints.load(path, identity, "cpu")["model"])
    source = runner.generator(0, TINY.steps)
    documents = synthetic.TASKS["markov"].documents(5, (16, 32), source)
    for length in (16, 32):
        window = documents.window(length)
        total = right = 0.0
        for tokens, truth in zip(window.tokens, window.truth, strict=True):
            logs = model(tokens[None])[0, -8:].double().log_softmax(-1)
            total -= (truth * logs).sum().item()
            right += (logs.argmax(-1) == truth.argmax(-1)).double().mean().item()
        assert found["model"][str(length)] == pytest.approx(total / 40, rel=1e-6)
        assert found["correct"][str(length)] == pytest.approx(right / 5)
        best = -(window.truth * window.optimum.log()).sum(-1).mean().item()
        assert found["optimum"][str(length)] == pytest.approx(best)
        assert found["model"][str(length)] > best


def test_seeds_change_documents_and_parameters_and_schemes_do_not(tmp_path):
    results = synthetic.run(SETTINGS, tmp_path)
    alibi, learned = results["alibi"], results["learned"]
    assert learned[0]["model"].keys() == {"16"}, "there are no embeddings beyond those of training"
    assert learned[0]["optimum"] == alibi[0]["optimum"]
    assert alibi[0]["optimum"] != alibi[1]["optimum"]
    weights = [
        runner.new_model(SETTINGS, scheme, seed).embedding.tokens.weight
        for scheme, seed in (("alibi", 0), ("none", 0), ("alibi", 1))
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_results_are_reused_and_those_of_others_refused(tmp_path, monkeypatch):
    first = synthetic.run(SETTINGS, tmp_path)
    monkeypatch.setattr(runner, "train", lambda *_, **__: pytest.fail("trained again"))
    assert synthetic.run(SETTINGS, tmp_path) == first
    part = replace(SETTINGS, schemes=("alibi",), seeds=(1,))
    assert synthetic.run(part, tmp_path) == {"alibi": {1: first["alibi"][1]}}
    with pytest.raises(CheckpointError, match=r"alibi-0.json is of another.*eval_lengths is"):
        synthetic.run(replace(SETTINGS, eval_lengths=(16, 64)), tmp_path)


@pytest.mark.parametrize("count", [2, 5, 9])
def test_intervals_are_those_of_students_test(count):
    values = torch.randn(count, dtype=torch.float64).tolist()
    interval = intervals.student(values)
    assert interval.mean == pytest.approx(statistics.fmean(values))
    for bound in interval[1:]:
        assert stats.ttest_1samp(values, bound).pvalue == pytest.approx(0.05)
    assert intervals.student([3.0]) == (3, -math.inf, math.inf)


def test_detectable_differences_are_found_with_the_stated_probability():
    """By simulation: of 20000 experiments, 0.8 have to be found, with a deviation of 0.003."""
    difference = intervals.detectable(2.0, 5)
    generator = torch.Generator().manual_seed(0)
    drawn = difference + 2 * torch.randn(20000, 5, dtype=torch.float64, generator=generator)
    found = stats.ttest_1samp(drawn.numpy(), 0, axis=1)
    assert ((found.pvalue < 0.05) & (found.statistic > 0)).mean() == pytest.approx(0.8, abs=0.015)


def measured(model: list[float], optimum: list[float]) -> dict[str, object]:
    lengths = ("16", "32")
    return {
        "model": dict(zip(lengths, model, strict=False)),
        "optimum": dict(zip(lengths, optimum, strict=True)),
        "correct": {"16": 0.25, "32": 0.5},
        "seconds": 30.0,
    }


BY_HAND = {
    "alibi": {0: measured([1.5, 1.4], [1.4, 1.2]), 1: measured([1.7, 1.6], [1.5, 1.3])},
    "none": {0: measured([1.6, 1.8], [1.4, 1.2]), 1: measured([1.6, 1.6], [1.5, 1.3])},
    "learned": {0: measured([1.5], [1.4, 1.2]), 1: measured([1.5], [1.5, 1.3])},
}


def interval(values: tuple[float, float], digits: int = 3) -> str:
    """Of two values: the quantile for one degree of freedom is tan(0.475 pi)."""
    mean, half = sum(values) / 2, math.tan(0.475 * math.pi) * abs(values[0] - values[1]) / 2
    return f"{mean:.{digits}f} [{mean - half:.{digits}f}, {mean + half:.{digits}f}]"


def test_tables_show_shares_of_the_gain_with_paired_intervals():
    these = replace(SETTINGS, schemes=tuple(BY_HAND))
    found = rows(report.markdown(these, BY_HAND))
    assert found[:5] == [
        ["scheme", "16", "32"],
        ["optimum", "1.4500", "1.2500"],
        ["alibi", "1.6000", "1.5000"],
        ["none", "1.6000", "1.7000"],
        ["learned", "1.5000", "-"],
    ]
    before = predict(formula_of("alibi", 2).bias, 1, 16, 32)
    excesses = interval((0.1, 0.2), 4), interval((0.2, 0.3), 4)
    assert found[6] == ["alibi", *excesses, f"{before:.3f}"]
    assert found[8][2:] == ["-", "-"]
    # The gain of the optimum is 0.2.
    assert found[9:] == [
        ["scheme", "32"],
        ["alibi", interval((0, -0.5))],
        ["none", interval((-2, -0.5))],
        ["learned", "-"],
        ["scheme", "difference from alibi"],
        ["none", interval((-2, 0))],
        ["scheme", "32"],
        ["alibi", interval((0.5, 0.5))],
        ["none", interval((-1, 0))],
        ["learned", "-"],
        ["scheme", "difference from alibi"],
        ["none", interval((-1.5, -0.5))],
    ]


def test_predictions_are_correlated_with_what_was_measured():
    """Predictions for none, a steep slope and a window of 4 are in this order, and shares in
    another."""
    schemes = ("alibi(exponent=1)", "none", "window(4)", "rotary")
    shares = dict(zip(schemes, (1.3, 1.4, 1.35, 1.2), strict=True))
    results = {s: {n: measured([1.5, shares[s]], [1.4, 1.2]) for n in (0, 1)} for s in schemes}
    text = report.markdown(replace(SETTINGS, schemes=schemes), results)
    # Ranks of predictions are 2, 3, 1 and those of shares 3, 1, 2.
    assert text.count("is -0.50, of 3 schemes") == 2


def test_the_optimum_has_a_share_of_1_and_no_change_means_the_loss_in_training():
    optimum = measured([1.4, 1.2], [1.4, 1.2])
    assert report.reached("16", optimum, "32") == report.change("16", optimum, "32") == 1
    # A model that wastes half of what it sees gains more than the optimum, but reaches less.
    wasteful = measured([1.8, 1.3], [1.4, 1.2])
    assert report.change("16", wasteful, "32") > 1 > report.reached("16", wasteful, "32")


def test_one_scheme_has_a_table_of_the_power_of_more():
    these = replace(SETTINGS, schemes=("alibi",))
    found = rows(report.markdown(these, {"alibi": BY_HAND["alibi"]}))
    (last,) = [row for row in found if row[0] == "20" and row[1] != "0.000"]
    # Shares of 0 and -0.5 deviate by 1 / sqrt 8, and differences of such pairs by 1 / 2.
    high = intervals.deviation([0, -0.5]).high * 2**0.5
    assert last == ["20", *(f"{intervals.detectable(x, 20):.3f}" for x in (0.5, high))]


def test_tables_without_what_they_compare_are_left_out():
    text = report.markdown(replace(SETTINGS, eval_lengths=(16,)), BY_HAND)
    assert "share" not in text
    only = {"learned": BY_HAND["learned"]}
    text = report.markdown(replace(SETTINGS, schemes=("learned",)), only)
    assert ["optimum", "1.4500", "1.2500"] in rows(text)
    assert "from learned" not in text
    one = {scheme: {0: models[0]} for scheme, models in BY_HAND.items()}
    text = report.markdown(replace(SETTINGS, seeds=(0,)), one)
    assert ["none", "-2.000"] in rows(text)
    assert "from alibi" not in text


def test_tasks_without_gain_have_accuracies():
    these = replace(SETTINGS, task="recall", schemes=("alibi",))
    *_, last = rows(report.markdown(these, {"alibi": BY_HAND["alibi"]}))
    assert last == ["alibi", "0.250 [0.250, 0.250]", "0.500 [0.500, 0.500]"]


def test_measures_are_those_of_the_task():
    these = replace(SETTINGS, schemes=tuple(BY_HAND))
    losses, shares = report.measures(these, BY_HAND)
    assert losses.curves["learned"] == {16: pytest.approx(intervals.student([0.1, 0]))}
    assert shares.curves["none"] == {32: pytest.approx(intervals.student([-2, -0.5]))}
    assert (losses.logarithmic, shares.logarithmic) == (True, False)
    _, right = report.measures(replace(these, task="recall"), BY_HAND)
    assert right.curves["alibi"] == {16: (0.25, 0.25, 0.25), 32: (0.5, 0.5, 0.5)}
    (only,) = report.measures(replace(these, eval_lengths=(16,)), BY_HAND)
    assert only.name == losses.name


def test_picture_labels_lines_that_leave_it():
    these = replace(SETTINGS, schemes=tuple(BY_HAND))
    lost = {**BY_HAND, "none": {n: measured([1.5, 9], [1.4, 1.2]) for n in (0, 1)}}
    left, right = picture.draw(these, lost).axes
    assert {text.get_text() for text in left.texts} == set(BY_HAND)
    assert {text.get_text() for text in right.texts} == {"alibi", "none ↓"}


@pytest.mark.parametrize("task", synthetic.TASKS)
def test_command_writes_tables_results_and_pictures(task, tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "Size", lambda: TINY)
    arguments = ["synthetic", task, "--biases", "alibi,learned", "--seeds", "0..1"]
    arguments += ["--lengths", "16..32", "--output", str(tmp_path)]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    table = (tmp_path / f"{task}.md").read_text()
    assert table in done.stdout
    record = json.loads((tmp_path / f"{task}.json").read_text())
    assert report.markdown(*report.read_report(tmp_path / f"{task}.json")) == table
    assert record["results"]["alibi"]["1"]["losses"]
    assert set(record["versions"]) == {"biased_flash_attn", "torch", "python"}
    assert (tmp_path / f"{task}.png").read_bytes().startswith(b"\x89PNG")
    assert f"<title>Task {task}</title>" in (tmp_path / f"{task}.html").read_text()
    for suffix in ("md", "json", "png", "html"):
        assert f"saved {tmp_path / task}.{suffix}" in done.output


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_tables_in_the_repository_are_those_of_their_results(path: Path):
    found = report.markdown(*report.read_report(path))
    assert_same_output(found, path.with_suffix(".md").read_text())


@pytest.mark.parametrize("task", ["recall", "parity"])
def test_fractions_in_the_documentation_are_those_in_the_repository(task):
    page = PAGE.read_text().partition(f"results/synthetic/{task}.md)")[2]
    (_, *lengths), *shown = rows(page.partition("\n\n")[2].partition("\n\n")[0])
    stored = rows((RESULTS / f"{task}.md").read_text().partition("token is right")[2])
    places = [stored[0].index(length) for length in lengths]
    assert {scheme: values for scheme, *values in shown} == {
        row[0]: [row[place] for place in places] for row in stored[1:]
    }


def test_tasks_that_are_learned_or_not_have_extremes():
    models = {seed: {"model": {"16": x}} for seed, x in enumerate((0.0, 4.0, 5.0))}
    found = report.over_seeds(models, lambda m, n: m["model"][n], 16, intervals.extremes)
    assert found == (3, 0, 5)
    assert report.brackets(SETTINGS) is intervals.student
    assert report.brackets(replace(SETTINGS, task="recall")) is intervals.extremes
    assert shown(intervals.extremes([2.0])) == "2.000"


def test_results_in_the_documentation_are_those_in_the_repository():
    page = PAGE.read_text().partition("| scheme           | excess at 64")[2]
    shown = rows(page.partition("![")[0])
    cells: dict[str, list[str]] = {}
    for scheme, *values in rows((RESULTS / "markov.md").read_text()):
        cells.setdefault(scheme, []).extend(values)
    assert len(shown) == 10
    for scheme, at_64, at_256, at_4096, change in shown:
        assert any(cell.startswith(f"{at_64} [") for cell in cells[scheme]), scheme
        assert any(cell.startswith(f"{at_256} [") for cell in cells[scheme]), scheme
        assert {at_4096, change} <= set(cells[scheme]), scheme


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "copy"}, "task is 'copy'; it may be markov, recall, parity"),
        ({"schemes": ("rope",)}, "positions is 'rope'"),
        ({"schemes": ()}, r"schemes is \(\); it must name one or more"),
        ({"seeds": ()}, r"seeds is \(\); it must have one or more, each once"),
        ({"seeds": (1, 1)}, r"seeds is \(1, 1\); it must have one or more, each once"),
        ({"eval_lengths": (32, 16)}, r"eval_lengths is \(32, 16\); it must ascend"),
        ({"eval_lengths": (4, 16)}, r"eval_lengths is \(4, 16\); the shortest may be 8"),
        ({"eval_lengths": (16, 23)}, r"eval_lengths is \(16, 23\); the second must be 24 or more"),
    ],
)
def test_invalid_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match="^" + message):
        replace(SETTINGS, **change)


def test_results_of_a_device_can_be_read_without_it(tmp_path):
    these = replace(SETTINGS, device="abacus")
    with pytest.raises(ValueError, match=r"^device is 'abacus', which cannot be used"):
        synthetic.run(these, tmp_path)
    assert not list(tmp_path.iterdir())
    write_record(tmp_path / "markov.json", these, {})
    assert report.read_report(tmp_path / "markov.json")[0] == these


@pytest.mark.parametrize("seeds", ["x", "3..", "0,,1", "4..2", "-1"])
def test_command_refuses_other_seeds(seeds, tmp_path):
    arguments = ["synthetic", "markov", "--seeds", seeds, "--output", str(tmp_path / "none")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2, done.output
    assert "must be like 0..4 or 0,3,5" in done.output
    assert not (tmp_path / "none").exists()


def test_command_refuses_folders_that_cannot_be_written_before_any_training(tmp_path):
    (tmp_path / "file").touch()
    arguments = ["synthetic", "markov", "--output", str(tmp_path / "file" / "folder")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 1, done.output
    assert "Not a directory" in done.output


def test_help_states_the_default_number_of_steps():
    done = CliRunner().invoke(main, ["synthetic", "--help"])
    assert f"[default: {Size().steps}]" in done.output
