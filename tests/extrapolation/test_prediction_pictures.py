"""The plots of predictions show what was predicted."""

from __future__ import annotations

import pytest

from biased_flash_attn import biases
from biased_flash_attn.extrapolation import information
from biased_flash_attn.extrapolation.comparison import by_model, comparisons, predicted
from biased_flash_attn.extrapolation.prediction import beyond

pictures = pytest.importorskip("biased_flash_attn.extrapolation.prediction_pictures")


def test_bars_are_the_means_of_the_heads_beyond_training():
    curves = {
        "alibi": information(biases.ALiBi(3, shift=2), 2, 64),
        "window": information(None, 2, 64, window=20),
    }
    bars, lines = pictures.of_schemes(curves, 16).axes
    widths = [bar.get_width() for bar in bars.patches]
    expected = [beyond(curve, 16, "separate") for curve in curves.values()]
    assert widths == pytest.approx(expected)
    assert 0 < min(expected) < max(expected) < 1
    drawn = {line.get_label(): line.get_ydata() for line in lines.lines}
    assert [drawn[name][16] for name in curves] == pytest.approx(expected)


def test_every_model_has_a_label_at_its_prediction_and_every_row_a_point():
    found = [x for x in comparisons() if x.of_altered_attention]
    (axes,) = pictures.against_published(found).axes
    models = by_model(found)
    labeled = sorted(label.xy[0] for label in axes.texts)
    assert labeled == pytest.approx(sorted(predicted(same[0]) for same in models))
    right = [label for label in axes.texts if label.xyann[0] > 1]
    assert len(right) == sum(predicted(same[0]) > pictures.LARGE for same in models)
    assert 0 < len(right) < len(models)
    markers = [line for line in axes.lines if line.get_marker() in pictures.MARKERS]
    assert sum(len(line.get_xdata()) for line in markers) == len(found)
