"""The tables and intervals of an experiment, against sums by hand."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from dataclasses import replace

import pytest
import torch
from scipy import stats

from biased_flash_attn import biases
from biased_flash_attn.extrapolation import experiment, predict
from biased_flash_attn.extrapolation.experiment import blocks, picture, report
from biased_flash_attn.extrapolation.experiment.counts import losses_of_counts
from biased_flash_attn.extrapolation.experiment.objective import OBJECTIVES
from biased_flash_attn.extrapolation.experiment.uncertainty import Sample
from biased_flash_attn.extrapolation.intervals import student
from biased_flash_attn.extrapolation.labelled_curves import spread
from biased_flash_attn.extrapolation.tables import shown

from .tables import rows

SIZE = experiment.Size(1, 16, 2, 6, 2, 1e-3, blocks=10, gradients=2)
SETTINGS = experiment.Settings(("alibi",), 16, (16, 32), SIZE, seeds=(0, 1))
REFERENCE = report.Reference("digest", 1000, 200, [1, 3], [math.log(8), math.log(4)])


def measured(first: list[float], second: list[float] | None) -> dict[str, object]:
    """Perplexities of two files at the two lengths."""
    nats = {"16": first} if second is None else {"16": first, "32": second}
    logs = {length: [math.log(x) for x in files] for length, files in nats.items()}
    return {"nats": logs, "seconds": 60.0, "theory": {}}


BY_HAND = {
    "alibi": {0: measured([4, 2], [4, 4]), 1: measured([4, 8], [4, 4])},
    "learned": {0: measured([4, 4], None), 1: measured([4, 4], None)},
    "rotary": {0: measured([2, 2], [8, 8]), 1: measured([2, 2], [8, 8])},
}


def test_perplexities_weigh_files_by_their_blocks():
    found = rows(report.markdown(SETTINGS, BY_HAND, REFERENCE))
    trained = 2 ** ((2 + 3 * 1 + 2 + 3 * 3) / 8)
    counts = f"{2 ** ((3 + 3 * 2) / 4):.4g}"
    assert found[:5] == [
        ["scheme", "16", "32"],
        ["counts", counts, counts],
        ["alibi", f"{trained:.4g}", "4"],
        ["learned", "4", "-"],
        ["rotary", "2", "8"],
    ]
    assert found[5] == ["scheme", "32"]
    ratio, low, high = map(float, re.findall(r"[\d.]+", found[6][1]))
    assert ratio == pytest.approx(4 / trained, abs=5e-4)
    assert low < ratio < high
    assert found[7] == ["learned", "-"]
    assert found[8] == ["rotary", "4.000 [4.000, 4.000]"]
    assert found[9:12] == [
        ["scheme", "perplexity / that of alibi"],
        ["learned", "-"],
        ["rotary", "2.000 [2.000, 2.000]"],
    ]


def test_tables_without_what_they_compare_are_left_out():
    only = {"learned": BY_HAND["learned"]}
    text = report.markdown(replace(SETTINGS, schemes=("learned",)), only, REFERENCE)
    assert ["learned", "4", "-"] in rows(text)
    assert "that of learned" not in text
    assert "divided by that at 16" in text
    text = report.markdown(replace(SETTINGS, eval_lengths=(32,)), BY_HAND, REFERENCE)
    assert "divided by that at" not in text
    assert "divided by that of alibi" in text


def test_intervals_have_the_variance_of_seeds_and_files():
    sample = Sample([1, 2, 1])
    nats = torch.tensor([[1.0, 2.0, 4.0], [3.0, 5.0, 0.5]], dtype=torch.float64)
    by_seed = ((1 + 4 + 4) / 4, (3 + 10 + 0.5) / 4)
    files = (nats.mean(0) * torch.tensor([1, 2, 1])).tolist()
    drawn = [
        sum(files[n] for n in found) / sum((1, 2, 1)[n] for n in found)
        for found in itertools.product(range(3), repeat=3)
    ]
    # Of three files; a bootstrap has the variance of a population of three.
    parts = statistics.variance(by_seed) / 2, statistics.pvariance(drawn) * 3 / 2
    found = sample.interval(nats)
    assert found.mean == pytest.approx(statistics.fmean(by_seed))
    # Welch and Satterthwaite: 1 degree of freedom, and one less than (1 + 2 + 1)^2 / (1 + 4 + 1).
    freedom = sum(parts) ** 2 / (parts[0] ** 2 + parts[1] ** 2 / (16 / 6 - 1))
    half = stats.t.ppf(0.975, freedom) * sum(parts) ** 0.5
    assert found.high - found.mean == pytest.approx(half, rel=0.05)  # of 1000 draws
    assert found.mean - found.low == pytest.approx(found.high - found.mean)


def test_intervals_of_one_seed_or_one_file_are_those_of_the_other():
    values = torch.randn(1, 40, dtype=torch.float64)
    of_files = Sample([1] * 40).interval(values)
    assert of_files.high - of_files.mean == pytest.approx(
        (student(values[0].tolist()).high - values.mean()).item(), rel=0.1
    )
    of_seeds = Sample([3]).interval(values.T)
    assert of_seeds == pytest.approx(student(values[0].tolist()))
    assert shown(Sample([1]).interval(values[:, :1]), 2) == f"{values[0, 0]:.2f}"


@pytest.mark.parametrize(
    ("blocks", "of_files", "of_seeds"),
    [
        ([1] * 40, 0.05, 1),
        ([1] * 40, 1, 0.05),
        ([1] * 40, 1, 0.2),
        ([3, 2, 1, 1] * 10, 1, 0.2),
        ([20] + [1] * 40, 1, 0.05),
    ],
)
def test_intervals_cover_the_truth(blocks, of_files, of_seeds):
    """Of 400 experiments with 3 seeds, 95 % with a deviation of 1.1 %; of files of very different
    sizes at least 90 %."""
    sample, covered = Sample(blocks), 0
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        files = torch.randn(1, len(blocks), dtype=torch.float64, generator=generator)
        seeds = torch.randn(3, 1, dtype=torch.float64, generator=generator)
        found = sample.interval(of_files * files + of_seeds * seeds)
        covered += found.low < 0 < found.high
    if max(blocks) > 3:
        assert covered / 400 > 0.9
    else:
        assert covered / 400 == pytest.approx(0.95, abs=0.033)


def test_blocks_are_whole_contexts_of_one_file():
    files = [torch.randint(256, (n,)).to(torch.uint8) for n in (100, 20, 33, 65)]
    found = blocks.choose(files, longest=32, scored=16, most=1000)
    places = [*((0, end) for end in (33, 49, 65, 81, 97)), (2, 33), (3, 33), (3, 49), (3, 65)]
    assert found.files.tolist() == [number for number, _ in places]
    for segment, (number, end) in zip(found.segments, places, strict=True):
        assert torch.equal(segment, files[number][end - 33 : end])
    some = blocks.choose(files, longest=32, scored=16, most=3)
    assert torch.equal(some.segments, found.segments[::4])
    train = torch.randint(256, (500,)).to(torch.uint8)
    counted = OBJECTIVES["causal"].counted(train, found.segments, 16, 256)
    for losses, (number, end) in zip(counted, places, strict=True):
        assert torch.equal(losses, losses_of_counts(train, files[number][:end], 256)[-16:])
    by_hand = [counted[:5].mean(), counted[5].mean(), counted[6:].mean()]
    assert blocks.mean_by_file(counted, found.files) == pytest.approx([x.item() for x in by_hand])


def test_receptive_fields_are_those_of_all_heads_and_predictions_those_of_formulas():
    results = {
        "alibi": {
            0: {
                "theory": {"fields": {"layers.0.bias": [9.0, 2.0], "layers.1.bias": [3.0, None]}},
                "attention_mass": {"layers.0": [4.2, 4.4]},
                "gradient": {"receptive_fields": {"embedding": [10, 14]}},
            },
            1: {
                "theory": {"fields": {"layers.0.bias": [9.0, 2.5]}},
                "attention_mass": {"layers.0": [4.2, 5.6]},
                "gradient": {"receptive_fields": {"embedding": [12, 16]}},
            },
        },
        "window(7)": {0: {"theory": {}}},
        "rotary": {0: {"theory": {}}},
    }
    lines = rows(report.receptive_fields(SETTINGS, results))
    cells = {name: values for name, *values in lines}
    first, second = (f"{x:.0f}" for x in biases.ALiBi(2).receptive_field(0.01))
    predicted = (
        predict(bias, SIZE.layers, 16, 32, window=window)
        for bias, window in ((biases.ALiBi(2), None), (None, 7))
    )
    # Means of sequences over the seeds are 11 and 15.
    assert cells["gradient, input of block 0: ERF"] == ["13 ± 2.0", "-", "-"]
    assert cells["weights: n_emp(0.01)"] == ["4 to 6", "-", "-"]
    assert cells["series, trained: TRF(0.01)"] == ["2 to infinite", "-", "-"]
    assert cells["series, untrained: TRF(0.01)"] == [f"{first} to {second}", "7", "-"]
    assert cells["predicted before training"] == [*(f"{x:.3f}" for x in predicted), "-"]


class Growing(biases.DistanceBias):
    def formula(self, d):
        return (0.1 * d.abs()).expand(self.num_heads, -1)


def test_a_bias_that_grows_with_the_distance_has_a_table_without_a_prediction():
    name = f"{__name__}:Growing"
    these = replace(SETTINGS, eval_lengths=(5000,))
    assert rows(report.receptive_fields(these, {name: {0: {"theory": {}}}}))[-1] == [
        "predicted before training",
        "-",
    ]


@pytest.mark.parametrize("scheme", ["none", "window(12)"])
def test_a_sliding_cache_is_stated_and_limits_predictions(scheme):
    these = replace(SETTINGS, cache=8)
    kept = "the last of which has the whole context, of which a sliding cache keeps 8 keys."
    assert kept in report.markdown(these, BY_HAND, REFERENCE)
    table = rows(report.receptive_fields(these, {scheme: {0: {"theory": {}}}}))
    assert table[-1][1] == f"{predict(None, SIZE.layers, 16, 32, window=8):.3f}"


def test_measures_are_perplexities_and_their_ratios():
    these = replace(SETTINGS, schemes=tuple(BY_HAND))
    perplexities, ratios = report.measures(these, BY_HAND, REFERENCE)
    assert perplexities.name == "perplexity of bytes (line: counts)"
    assert perplexities.curves["rotary"][32].mean == pytest.approx(8)
    assert perplexities.limits == (pytest.approx(2 / 1.05), pytest.approx(1.05 * 2 ** (9 / 4)))
    assert perplexities.curves["learned"].keys() == ratios.curves["learned"].keys() == {16}
    assert ratios.curves["rotary"] == {16: (1, 1, 1), 32: pytest.approx((4, 4, 4))}
    (only,) = report.measures(replace(these, eval_lengths=(16,)), BY_HAND, REFERENCE)
    assert only.name == perplexities.name
    longer, learned = replace(these, eval_lengths=(32,)), {"learned": BY_HAND["learned"]}
    (none,) = report.measures(longer, learned, REFERENCE)
    assert none.limits == (REFERENCE.perplexity / 1.05, REFERENCE.perplexity * 1.05)


def test_picture_labels_every_line_at_its_end():
    these = replace(SETTINGS, schemes=tuple(BY_HAND))
    axes, *_ = picture.draw(these, BY_HAND, REFERENCE).axes
    labels = {text.get_text(): text for text in axes.texts}
    assert labels.keys() == {"alibi", "learned", "rotary ↑"}
    assert labels["rotary ↑"].xy == (32, pytest.approx(1.05 * REFERENCE.perplexity))
    assert labels["learned"].xy == (16, pytest.approx(4))
    assert labels["alibi"].get_position()[1] < labels["rotary ↑"].get_position()[1]


def test_picture_has_the_field_of_every_block():
    size = replace(SIZE, layers=2)
    results = {}
    for scheme, first in (("alibi", 4), ("none", 16)):
        fields = {"embedding": [first, 3 * first], "blocks.0": [first, first]}
        curve = {"tokens": [1, 2], "share": [0.5, 1.0], "receptive_fields": fields}
        results[scheme] = {0: measured([4, 2], [4, 4]) | {"gradient": curve}}
    these = replace(SETTINGS, schemes=("alibi", "none"), size=size, seeds=(0,))
    axes = picture.draw(these, results, REFERENCE).axes[-1]
    drawn = [bar.lines[0].get_ydata().tolist() for bar in axes.containers]
    assert drawn == [[8, 4], [32, 16]]
    assert report.field_of_gradient(results["alibi"], "embedding") == (8, 4)
    assert [text.get_text() for text in axes.texts] == ["alibi", "none"]


@pytest.mark.parametrize(
    ("heights", "expected"),
    [
        ([], []),
        ([0.1, 0.5], [0.1, 0.5]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.5, 0.52, 0.9], [0.46, 0.56, 0.9]),
        ([0.5, 0.5, 0.58], [0.5 - 0.08 + 0.0066666, 0.5266666, 0.6266666]),
    ],
)
def test_labels_are_moved_as_little_as_possible(heights, expected):
    assert spread(heights, 0.1) == pytest.approx(expected, abs=1e-5)
