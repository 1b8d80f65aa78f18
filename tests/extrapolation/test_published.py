"""The published perplexities, and predictions compared with them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from biased_flash_attn import biases
from biased_flash_attn.extrapolation import agreement, predict, published
from biased_flash_attn.extrapolation.agreement import Agreement, rank_correlation, ranks
from biased_flash_attn.extrapolation.comparison import (
    CHOICE,
    HELD_OUT,
    SCHEMES_HELD_OUT,
    VARIANTS,
    Comparison,
    Variant,
    comparisons,
    fields_beyond,
    largest_field,
    predicted,
)
from biased_flash_attn.extrapolation.formulas import formula_of
from biased_flash_attn.nn import positions

ROWS = published.rows()
# By paper and table: rows, numbers, and their sum, which was computed from the papers' text.
TABLES = {
    ("Chi", "1"): (17, 85, 2636.3),
    ("Chi", "2"): (4, 12, 150.0),
    ("Chi", "3"): (21, 105, 251092.94),
    ("Chi", "4"): (17, 85, 8440.2),
    ("Chi", "5"): (6, 18, 192.82),
    ("Qin", "4"): (14, 196, 5682.92),
    ("Qin", "5"): (14, 196, 4979.01),
    ("Qin", "6"): (8, 112, 3011.22),
    ("Veisi", "1"): (18, 100, 19405.63),
    ("Veisi", "3"): (18, 100, 22702.96),
    ("Veisi", "4"): (18, 100, 11709.55),
}


def row(paper: str, table: str, dataset: str, label: str, model: str = "") -> published.Row:
    (found,) = (
        r
        for r in ROWS
        if (r.paper.split()[0], r.table, r.dataset, r.label, r.model)
        == (paper, table, dataset, label, model)
    )
    return found


def test_every_table_is_whole():
    counts, sums = Counter(), Counter()
    for r in ROWS:
        key = r.paper.split()[0], r.table
        counts[key, "rows"] += 1
        counts[key, "numbers"] += len(r.perplexity)
        sums[key] += sum(r.perplexity.values())
    found = {
        key: (counts[key, "rows"], counts[key, "numbers"], round(sums[key], 2)) for key in sums
    }
    assert found == TABLES


@pytest.mark.parametrize(
    ("of", "length", "value"),
    [
        (("Chi", "1", "ArXiv", "shift -3"), 8192, 7.15),
        (("Chi", "1", "ArXiv", "window 160"), 1024, 67.4),
        (("Chi", "2", "OpenWebText2", "shift 6"), 4096, 19.8),
        (("Chi", "3", "GitHub", "T5"), 2048, 2.65),
        (("Chi", "4", "OpenWebText2", "equal 6"), 1024, 146),
        (("Chi", "5", "ArXiv", "ALiBi"), 16384, 5.59),
        (("Qin", "4", "Books", "Kerple-Power"), 1280, 7.08),
        (("Qin", "6", "WikiBook", "1/(n ln n)"), 9216, 133.36),
        (("Veisi", "1", "FineWeb-Edu-10B", "Kerple", "GPT-Medium"), 15360, 26.13),
        (("Veisi", "4", "WikiText-103", "CABLE", "GPT-Small"), 512, 20.93),
    ],
)
def test_numbers_are_those_of_the_papers(of, length, value):
    assert row(*of).perplexity[length] == value


def test_settings_are_those_of_the_papers():
    assert row("Chi", "3", "GitHub", "T5").deviation == dict(
        zip((512, 1024, 2048, 4096, 8192), (0.14, 0.08, 0.05, 0.12, 0.5), strict=True)
    )
    assert row("Qin", "4", "WikiText-103", "Type1").layers == 6
    assert row("Veisi", "1", "FineWeb-Edu-10B", "Learnable", "GPT-Medium").perplexity.keys() == {
        512,
        1024,
    }
    assert row("Chi", "2", "ArXiv", "window 160").train_length == 1024
    for r in ROWS:
        scheme = positions(r.scheme)
        assert scheme.bias or scheme.window or scheme.embedding or scheme.rotary
        if "window" in r.label:
            assert r.scheme == f"window({scheme.window})"
            assert r.label == f"window {scheme.window}"


def test_comparisons_are_of_formulas_without_training():
    found = comparisons()
    assert {x.row.label for x in found}.isdisjoint(("CABLE", "T5", "Kerple", "Fire", "RoPE"))
    by_label = {(x.row.label, x.row.dataset, x.row.table): x for x in found}
    x = by_label["window 120", "OpenWebText2", "4"]
    assert (x.lengths, x.loss) == ((512, 8192), math.log(137 / 24.0))
    assert predicted(x) == predict(None, 12, 512, 8192, window=120)
    assert predicted(x, Variant("mixed", 2.0, 0.5)) == predict(
        None, 12, 512, 8192, window=120, heads="mixed", content=2, residual=0.5
    )
    assert predicted(x, largest_field) == 12 * 119 + 1
    # The shortest length after that of training.
    assert by_label["window 160", "ArXiv", "2"].lengths == (2048, 8192)


def test_every_second_scheme_is_held_out():
    labels = [r.label for r in ROWS if (r.paper[:3], r.table) == ("Chi", "1")]
    parts = {x.row.label: x.part for x in comparisons() if x.of_altered_attention}
    assert [label for label, part in parts.items() if part == CHOICE] == labels[::2]
    assert [label for label, part in parts.items() if part == HELD_OUT] == labels[1::2]
    rows = {part: [x for x in comparisons() if x.part == part] for part in (CHOICE, HELD_OUT)}
    schemes = {part: {x.row.scheme for x in rows[part]} for part in rows}
    assert [len(rows[part]) for part in rows] == [35, 42]
    assert [len(schemes[part]) for part in rows] == [13, 12]
    assert schemes[HELD_OUT] == SCHEMES_HELD_OUT


def test_largest_field_is_that_of_the_widest_head():
    first, second = biases.ALiBi(2).receptive_field(0.01).tolist()
    assert first < second
    assert largest_field(formula_of("alibi", 2), layers=3) == 3 * (second - 1) + 1


def test_fields_beyond_training_are_those_of_all_heads():
    through = [3 * (keys - 1) + 1 for keys in biases.ALiBi(2).receptive_field(0.01).tolist()]
    between = sum(through) / 2
    fraction = (1 - between / max(through)) / 2
    assert fields_beyond(formula_of("alibi", 2), 3, between, 0) == pytest.approx(fraction)
    assert fields_beyond(formula_of("none", 2), 3, 512, 0) == 1


def test_a_sliding_cache_is_not_compared():
    assert "cache" in row("Chi", "5", "ArXiv", "ALiBi").protocol
    assert all("cache" not in r.protocol for r in ROWS if r.table != "5")
    assert {x.row.table for x in comparisons() if x.row.paper.startswith("Chi")} == set("1234")


@pytest.mark.slow  # 42 variants
def test_the_default_is_the_variant_that_scores_best_on_the_rows_for_the_choice():
    found = [x for x in comparisons() if x.part == CHOICE]
    assert max(VARIANTS, key=lambda variant: Agreement(found, variant).score()) == Variant()


def test_ranks_of_ties_are_means(seed):
    x = torch.tensor([3.0, 1.0, 3.0, 2.0])
    assert ranks(x).tolist() == [2.5, 0, 2.5, 1]
    found = rank_correlation(x, torch.tensor([30.0, 10.0, 20.0, 15.0]))
    # Ranks (2.5, 0, 2.5, 1) and (3, 0, 2, 1), each with mean 1.5.
    assert found == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    y = torch.rand(20)
    assert rank_correlation(y, y.exp()) == pytest.approx(1)
    assert rank_correlation(y, -(y**3)) == pytest.approx(-1)
    assert math.isnan(rank_correlation(y, torch.ones(20)))


def made_up(losses: dict[str, list[float]], guesses: list[float]) -> Agreement:
    """Of schemes 0, 1, ... in Chi's table 1 with these losses by text."""
    found = [
        Comparison(replace(ROWS[0], dataset=text, scheme=str(n)), CHOICE, (1, 2), loss)
        for text, values in losses.items()
        for n, loss in enumerate(values)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "predicted", lambda x, _: guesses[int(x.row.scheme)])
        return Agreement(found, Variant())


def test_agreement_is_the_mean_of_the_texts_and_that_of_all_rows():
    got = made_up({"a": [0.0, 0.1, 1.0, 2.0], "b": [0.2, 0.3, 0.4, 0.35]}, [0.0, 0.1, 0.4, 0.9])
    assert (len(got.schemes), len(got.found)) == (4, 8)
    assert got.within() == pytest.approx((1 + 0.8) / 2)
    pairs = got.predicted, got.losses
    assert got.overall() == pytest.approx(rank_correlation(*pairs)) != got.within()
    assert got.score() == pytest.approx((got.within() + got.overall()) / 2)
    # A doubled row and one of the same scheme that is not are predicted alike.
    assert got.doubled() == pytest.approx((2 * 6 - 1 - 2 * 0.5) / 12)
    low, high = got.interval(got.within)
    assert low < got.within() < high == pytest.approx(1)


def test_intervals_draw_schemes_with_all_their_texts():
    got = made_up({"a": [0.0, 0.1], "b": [0.0, 0.1]}, [0.1, 0.2])
    # Two of the schemes, or twice the same one, which has no correlation.
    assert got.interval(got.overall) == pytest.approx((1, 1))
    assert all(len({got.found[n].row.scheme for n in places}) == 1 for places in got.schemes)


def test_predictions_are_rounded_to_three_decimals():
    got = made_up({"a": [0.0, 0.1, 1.0, 2.0]}, [0.501, 0.502, 0.9999, 1.0])
    assert ranks(got.predicted).tolist() == [0, 1, 2.5, 2.5]


def test_intervals_are_of_95_percent():
    got = made_up({"a": [float(n) for n in range(100)]}, list(range(100)))
    low, high = got.interval(lambda places: sum(places) / len(places))
    # The mean of 100 draws from 0, ..., 99 has a standard deviation of 2.89.
    assert (low, high) == pytest.approx((49.5 - 1.96 * 2.89, 49.5 + 1.96 * 2.89), abs=0.6)


def test_ties_and_infinite_predictions_order_half_of_the_pairs():
    infinite = math.inf
    got = made_up({"a": [0.0, 0.1, 1.0, 2.0]}, [5.0, infinite, infinite, infinite])
    assert got.doubled() == (1 + 0.5 + 1 + 0.5) / 4
