"""Forecasts of time series by Chronos, which is T5, and Chronos-Bolt, T5 over patches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.integrations.libraries.cases import QUANTILES, save_chronos_bolt, save_chronos_t5
from tests.integrations.transformers.cases import accelerate, unaccelerate
from tests.support.numerics import assert_same_model

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]
# Longer and shorter than the context of the models, and no multiples of patches.
LENGTHS = (80, 64, 37, 5, 50)


def load(folder, **options):
    from chronos import BaseChronosPipeline

    return BaseChronosPipeline.from_pretrained(folder, device_map="cpu", **options)


def series(gap: bool = True) -> list[Tensor]:
    """Of different lengths. Some have a gap of more than two patches, and missing values."""
    found = [torch.randn(n).cumsum(0) for n in LENGTHS]
    if gap:
        found[0][40:55] = torch.nan
        found[2][20:29] = torch.nan
        found[4][[3, 7, 31, 48]] = torch.nan
    return found


@pytest.mark.parametrize("gap", [False, True])
def test_chronos_t5(tmp_path, gap):
    save_chronos_t5(tmp_path)
    pipeline, inputs = load(tmp_path), series(gap)
    # Samples from the most probable value alone are equal.
    options = {"prediction_length": 20, "num_samples": 2, "top_k": 1}
    forecast, (states, scale) = pipeline.predict(inputs, **options), pipeline.embed(inputs)
    assert accelerate(pipeline) is pipeline
    assert torch.equal(pipeline.predict(inputs, **options), forecast)
    kept = torch.stack([tail_of_context(x) for x in inputs]).isfinite()
    kept = torch.nn.functional.pad(kept, (0, 1), value=True)  # the end of the series
    ours, our_scale = pipeline.embed(inputs)
    assert_same_model(ours[kept], states[kept], "embeddings")
    assert torch.equal(our_scale, scale)
    assert forecast.std(-1).min() > 0
    assert torch.equal(unaccelerate(pipeline).embed(inputs)[0], states)


def tail_of_context(x: Tensor) -> Tensor:
    """What Chronos keeps of a series, with NaN before one that is shorter."""
    return torch.nn.functional.pad(x, (64 - len(x), 0), value=torch.nan)[-64:]


@pytest.mark.parametrize("use_reg_token", [True, False])
@pytest.mark.parametrize("gap", [False, True])
def test_chronos_bolt(tmp_path, gap, use_reg_token):
    save_chronos_bolt(tmp_path, use_reg_token=use_reg_token)
    pipeline, inputs = load(tmp_path), series(gap)
    options = {"prediction_length": 20, "quantile_levels": [0.1, 0.5, 0.75]}
    expected = pipeline.predict_quantiles(inputs, **options)
    assert accelerate(pipeline) is pipeline
    actual = pipeline.predict_quantiles(inputs, **options)
    for ours, theirs, what in zip(actual, expected, ("quantiles", "means"), strict=True):
        assert_same_model(ours, theirs, what)
    restored = unaccelerate(pipeline).predict_quantiles(inputs, **options)
    assert torch.equal(restored[0], expected[0])


def test_training_chronos_bolt(tmp_path):
    save_chronos_bolt(tmp_path)
    model = load(tmp_path).model.eval()
    contexts = torch.stack([tail_of_context(x) for x in series()])
    targets = torch.randn(len(contexts), 8)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(contexts, target=targets.clone()).loss.backward()
        return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}

    expected = gradients()
    accelerate(model)
    actual = gradients()
    assert actual.keys() == expected.keys()
    largest = torch.stack([x.abs().max() for x in expected.values()])
    for name, gradient in expected.items():
        # The decoder has a single token, whose weight does not depend on its logit.
        assert_same_model(actual[name], gradient, name, gradient if gradient.any() else largest)


def test_chronos_2_is_refused():
    from chronos import Chronos2Model, Chronos2Pipeline
    from chronos.chronos2.config import Chronos2CoreConfig

    config = Chronos2CoreConfig(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    config.chronos_config = {
        "context_length": 64,
        "output_patch_size": 4,
        "input_patch_size": 4,
        "input_patch_stride": 4,
        "quantiles": QUANTILES,
        "use_reg_token": True,
        "max_output_patches": 4,
    }
    pipeline = Chronos2Pipeline(Chronos2Model(config).eval())
    inputs = torch.randn(2, 1, 40)
    expected = pipeline.predict(inputs, prediction_length=8)
    with pytest.raises(NotImplementedError, match=r"^Chronos2Model in Chronos2Pipeline has no"):
        accelerate(pipeline)
    for ours, theirs in zip(pipeline.predict(inputs, prediction_length=8), expected, strict=True):
        assert torch.equal(ours, theirs)
