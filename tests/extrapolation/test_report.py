"""The tables of an experiment."""

from __future__ import annotations

import json
from dataclasses import replace

from biased_flash_attn import biases
from biased_flash_attn.extrapolation import experiment, predict
from biased_flash_attn.extrapolation.experiment import report
from tests.project.test_docs import ROOT, assert_same_output

SIZE = experiment.Size(1, 16, 2, 6, 2, 1e-3, stream=200, segments=3, gradients=2)
SETTINGS = experiment.Settings(("alibi",), 16, (16, 32), SIZE)


def test_tables_have_a_row_per_length():
    results = {
        "alibi": {"perplexity": {"sliding": {"16": {"perplexity": 7.4321}}}},
        "learned": {"perplexity": {"sliding": {}}},
    }
    lines = report.perplexities(replace(SETTINGS, eval_lengths=(16,)), results, "sliding")
    assert lines.splitlines() == [
        "| context | alibi | learned |",
        "|---------|------:|--------:|",
        "| 16      | 7.432 |       - |",
    ]


def test_receptive_fields_are_those_of_all_heads_and_predictions_those_of_formulas():
    results = {
        "alibi": {
            "theory": {"fields": {"layers.0.bias": [9.0, 2.0], "layers.1.bias": [3.0, None]}},
            "attention_mass": {"layers.0": [4.2, 4.4]},
            "gradient": {"receptive_field": 12.6},
        },
        "window(7)": {"theory": {}},
        "rotary": {"theory": {}},
    }
    lines = report.receptive_fields(SETTINGS, results).splitlines()
    cells = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in lines}
    shown = {name: [cell.strip() for cell in row] for name, row in cells.items()}
    first, second = (f"{x:.0f}" for x in biases.ALiBi(2).receptive_field(0.01))
    predicted = (
        predict(bias, SIZE.layers, 16, 32, window=window)
        for bias, window in ((biases.ALiBi(2), None), (None, 7))
    )
    assert shown["gradient: ERF"] == ["13", "-", "-"]
    assert shown["weights: n_emp(0.01)"] == ["4", "-", "-"]
    assert shown["series, trained: TRF(0.01)"] == ["2 to infinite", "-", "-"]
    assert shown["series, untrained: TRF(0.01)"] == [f"{first} to {second}", "7", "-"]
    assert shown["predicted before training"] == [*(f"{x:.3f}" for x in predicted), "-"]


class Growing(biases.DistanceBias):
    def formula(self, d):
        return (0.1 * d.abs()).expand(self.num_heads, -1)


def test_a_bias_that_grows_with_the_distance_has_a_table_without_a_prediction():
    name = f"{__name__}:Growing"
    results = {name: {"theory": {}}}
    lines = report.receptive_fields(replace(SETTINGS, eval_lengths=(5000,)), results).splitlines()
    assert [cell.strip() for cell in lines[-1].split("|")[1:-1]] == [
        "predicted before training",
        "-",
    ]


def test_the_table_in_the_repository_is_that_of_its_results():
    folder = ROOT / "bench" / "results" / "extrapolation"
    record = json.loads((folder / "results.json").read_text())
    values = record["settings"] | {"size": experiment.Size(**record["settings"]["size"])}
    for name in ("schemes", "eval_lengths"):
        values[name] = tuple(values[name])
    counts = record["perplexity of counts"]
    shown = report.markdown(experiment.Settings(**values), record["results"], counts)
    assert_same_output(shown, (folder / "table.md").read_text())
