"""What reaches a token through all layers: against random walks, limits and invariances."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from biased_flash_attn import biases
from biased_flash_attn.extrapolation import information, predict
from biased_flash_attn.extrapolation.prediction import HEADS

WALKS = 10_000


def of_function(function, num_heads: int = 1) -> biases.DistanceBias:
    return biases.DistanceBias.from_function(function, num_heads)


def random_bias(num_heads: int, length: int) -> biases.DistanceBias:
    table = 8 * torch.rand(num_heads, length, dtype=torch.float64)
    return of_function(lambda d: table[:, d.long()], num_heads)


def taken(bias: biases.DistanceBias, length: int, content: float) -> Tensor:
    """What a query takes from each distance: products q.k raise it by up to exp(content)."""
    weights = bias.curve(torch.arange(length).double()).exp()
    largest = weights.amax(1, keepdim=True)
    return (weights * math.exp(content)).minimum(largest)


def simulated(
    bias: biases.DistanceBias,
    layers: int,
    length: int,
    *,
    content: float,
    residual: float,
    mixed: bool,
) -> Tensor:
    """Counts of the distances of random walks, one step at a time, (heads, length)."""
    d = torch.arange(length)
    weights = taken(bias, length, content)
    counts = []
    for head in range(1 if mixed else bias.num_heads):
        position = torch.full((WALKS,), length - 1)
        for _ in range(layers):
            heads = torch.randint(bias.num_heads, (WALKS,)) if mixed else torch.tensor(head)
            visible = weights[heads].expand(WALKS, -1).masked_fill(d > position[:, None], 0)
            step = visible.multinomial(1)[:, 0]
            position = position - step.where(torch.rand(WALKS) >= residual, 0)
        counts.append(torch.bincount(length - 1 - position, minlength=length))
    return torch.stack(counts) / WALKS


@pytest.mark.parametrize("mixed", [False, True])
def test_information_is_that_of_random_walks(mixed, seed):
    layers, length, heads = random.randint(1, 4), random.randint(2, 17), random.randint(1, 3)
    options = {"content": random.choice([0.0, 1.0, 6.0]), "residual": random.choice([0.0, 0.3])}
    bias = random_bias(heads, length)
    found = information(bias, layers, length, mixed=mixed, **options)
    walked = simulated(bias, layers, length, mixed=mixed, **options)
    # Six standard deviations of a fraction, and some walks where few are expected.
    deviation = (found * (1 - found) / WALKS).sqrt()
    assert found.shape == walked.shape
    assert ((found - walked).abs() <= 6 * deviation + 8 / WALKS).all()


@pytest.mark.parametrize("length", [1, 17, 63, 130])
def test_information_equals_products_of_attention_matrices(length, seed):
    bias, layers, residual, content = (
        random_bias(2, length),
        3,
        random.random(),
        5 * random.random(),
    )
    distances = torch.arange(length)[:, None] - torch.arange(length)
    weights = taken(bias, length, content)[:, distances.clamp(min=0)].tril()
    identity = torch.eye(length, dtype=torch.float64)
    matrices = residual * identity + (1 - residual) * weights / weights.sum(-1, keepdim=True)
    separate = matrices.matrix_power(layers)[:, -1].flip(-1)
    options = {"content": content, "residual": residual}
    found = information(bias, layers, length, **options)
    torch.testing.assert_close(found, separate, rtol=0, atol=1e-9)
    mixed = matrices.mean(0).matrix_power(layers)[-1:].flip(-1)
    found = information(bias, layers, length, mixed=True, **options)
    torch.testing.assert_close(found, mixed, rtol=0, atol=1e-9)


@pytest.mark.parametrize("residual", [0.0, 0.5])
@pytest.mark.parametrize("bias", [None, biases.ALiBi(3)])
def test_windows_reach_exactly_their_receptive_field(bias, residual, seed):
    layers, window = random.randint(1, 4), random.randint(2, 9)
    field = layers * (window - 1) + 1
    options = {"window": window, "content": 0, "residual": residual}
    found = information(bias, layers, field + 50, **options)
    # In the longest walk, every layer takes the longest step.
    steps = torch.zeros(1, window) if bias is None else bias.curve(torch.arange(window).double())
    longest = ((1 - residual) * steps.softmax(-1)[:, -1]) ** layers
    farthest = found[:, field - 1].expand_as(longest).double()
    torch.testing.assert_close(farthest, longest.double(), rtol=1e-6, atol=1e-15)
    assert not found[:, field:].any()
    assert predict(bias, layers, field, field + 50, **options) == 0


def test_uniform_attention_of_one_layer_is_uniform():
    found = information(None, 1, 200)
    torch.testing.assert_close(found, torch.full((1, 200), 1 / 200, dtype=torch.float64))
    assert predict(None, 1, 50, 200) == pytest.approx(0.75)
    assert predict(None, 1, 50, 200, residual=0.5) == pytest.approx(0.375)


@pytest.mark.parametrize("content", [0, 2, 100])
def test_one_layer_has_the_mass_of_the_series_that_content_raises(content):
    terms = 1 / torch.arange(1, 101).double().square()
    terms = (math.exp(content) * terms).clamp(max=1)
    found = predict(biases.Type1(1), 1, 20, 100, content=content)
    assert found == pytest.approx((terms[20:].sum() / terms.sum()).item())


def test_two_layers_are_the_convolution_of_a_series_that_has_decayed():
    bias = of_function(lambda d: -d)
    ratio = torch.exp(torch.tensor(-1.0, dtype=torch.float64))
    d = torch.arange(200)
    found = information(bias, 2, 200, content=0)[0]
    torch.testing.assert_close(found[:50], ((1 - ratio) ** 2 * (d + 1) * ratio**d)[:50])


@pytest.mark.parametrize("heads", HEADS)
def test_prediction_does_not_depend_on_constants_and_the_order_of_heads(heads, seed):
    table = torch.randn(4, 60, dtype=torch.float64)
    changed = table[torch.randperm(4)] + 100 * torch.randn(4, 1, dtype=torch.float64)
    first, second = (
        predict(of_function(lambda d, t=t: t[:, d.long()], 4), 3, 20, 60, heads=heads)
        for t in (table, changed)
    )
    assert first == pytest.approx(second, abs=1e-9)


def test_heads_are_combined_as_named(seed):
    bias = random_bias(3, 60)
    each = [predict(biases.of_heads(bias, h, h + 1), 3, 20, 60) for h in range(3)]
    assert predict(bias, 3, 20, 60) == pytest.approx(sum(each) / 3)
    assert predict(bias, 3, 20, 60, heads="narrowest") == pytest.approx(min(each))
    same = of_function(lambda d: -0.05 * d, 3)
    found = [predict(same, 3, 20, 60, heads=heads) for heads in HEADS]
    assert found == pytest.approx([found[0]] * 3)


def test_prediction_grows_with_layers_and_evaluation_and_falls_with_training(seed):
    bias = biases.ALiBi(4, shift=2)
    for few, many in (
        ((bias, 2, 40, 100), (bias, 3, 40, 100)),
        ((bias, 2, 40, 60), (bias, 2, 40, 100)),
        ((bias, 2, 41, 100), (bias, 2, 40, 100)),
        ((biases.ALiBi(4), 2, 40, 100), (bias, 2, 40, 100)),
    ):
        assert 0 < predict(*few) < predict(*many) < 1
    assert predict(*few, content=3) < predict(*few, content=4)
    assert predict(bias, 3, 100, 100) == predict(bias, 3, 100, 30) == 0


def test_a_whole_residual_keeps_everything_at_its_token():
    found = information(biases.ALiBi(2), 5, 30, residual=1)
    assert torch.equal(found, torch.eye(30, dtype=torch.float64)[:1].expand(2, -1))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bias": biases.FIRE(2)}, TypeError, "bias is a FIRE; it must be a function of the dist"),
        ({"bias": "alibi"}, TypeError, "bias is a str"),
        ({"bias": of_function(lambda d: d)}, ValueError, "bias grows with the distance"),
        ({"bias": of_function(lambda d: d.log())}, ValueError, "bias grows with the distance"),
        ({"layers": 0}, ValueError, "layers must be positive"),
        ({"train_length": 0}, ValueError, "train_length must be positive"),
        ({"eval_length": 2.5}, TypeError, "eval_length must be an int"),
        ({"window": 0}, ValueError, "window must be positive"),
        ({"heads": "all"}, ValueError, "heads is 'all'; it may be separate, narrowest, mixed"),
        ({"content": -1.0}, ValueError, "content is -1.0; it must be at least 0"),
        ({"content": float("nan")}, ValueError, "content must be finite, not nan"),
        ({"content": "6"}, TypeError, "content must be a number, not '6'"),
        ({"residual": None}, TypeError, "residual must be a number, not None"),
        ({"content": float("inf")}, ValueError, "content must be finite, not inf"),
        ({"residual": 1.5}, ValueError, "residual is 1.5; it must be from 0 to 1"),
    ],
)
def test_invalid_arguments_are_refused(options, error, message):
    arguments = {"bias": biases.ALiBi(2), "layers": 2, "train_length": 9, "eval_length": 40}
    with pytest.raises(error, match="^" + message):
        predict(**(arguments | options))
