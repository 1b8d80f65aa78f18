"""FIRE, and other functions of a normalized distance."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from biased_flash_attn.biases import FIRE, NormalizedBias
from biased_flash_attn.forms import Geometry
from tests.support.numerics import assert_close_to_float64

HEADS = 3


def drawn_fire(init_length: float) -> FIRE:
    """FIRE with knots on both sides of the range of its arguments, and a unit without knots."""
    bias = FIRE(HEADS, width=16, init_length=init_length).double()
    with torch.no_grad():
        for parameter in bias.mlp.parameters():
            parameter.normal_()
        bias.mlp[0].weight[3] = 0
        bias.c.copy_(-torch.rand(()) - 0.01)
        bias.L_multiplier.uniform_(0.5, 2)
    return bias


def published(bias: FIRE, n_query: int, n_key: int, divided=torch.div) -> torch.Tensor:
    """The bias of the paper's listing: the MLP of every pair's normalized distance."""
    positions = torch.arange(n_key, dtype=torch.float64)
    queries = positions[n_key - n_query :]
    rel_distance = queries[:, None] - positions[None, :]
    threshold = torch.abs(bias.L_multiplier * bias.init_L)
    pos_normalizer = torch.max(queries, threshold)[:, None]
    rel_distance = torch.log(torch.abs(bias.c * rel_distance) + 1)
    pos_normalizer = torch.log(torch.abs(bias.c * pos_normalizer) + 1) + 1e-6
    return bias.mlp(divided(rel_distance, pos_normalizer)[..., None]).permute(2, 0, 1)


def absolute(bias: FIRE) -> FIRE:
    """With the absolute values of its MLP's weights, so that its terms do not cancel."""
    bias = copy.deepcopy(bias)
    with torch.no_grad():
        for parameter in bias.mlp.parameters():
            parameter.abs_()
    return bias


def divided_without_cancellation(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x / y, with gradients of the same sign for x and y."""
    return x / y.detach() + (x / y).detach() - x.detach() / y


@pytest.mark.parametrize("init_length", [1.0, 12.0, 500.0])
@pytest.mark.parametrize("lengths", [(1, 1), (17, 17), (5, 40)])
def test_equals_the_published_listing(init_length, lengths):
    bias = drawn_fire(init_length)
    size, weights = absolute(bias), torch.randn(HEADS, *lengths).double()

    def results(pairs, weights, parameters):
        return pairs, *torch.autograd.grad((pairs * weights).sum(), [*parameters])

    ours = results(bias.dense(*lengths), weights, bias.parameters())
    exact = results(published(bias, *lengths), weights, bias.parameters())
    pairs = published(size, *lengths, divided_without_cancellation)
    terms = results(pairs, weights.abs(), size.parameters())
    names = ["bias", *dict(bias.named_parameters())]
    for name, *result, of_terms in zip(names, ours, exact, terms, strict=True):
        assert_close_to_float64(*result, None, name, of_terms)


def test_parameters_and_initial_values_are_the_published_ones():
    bias = FIRE(12)
    shapes = {name: tuple(x.shape) for name, x in bias.state_dict().items()}
    assert shapes == {
        "c": (),
        "L_multiplier": (),
        "init_L": (),
        "mlp.0.weight": (32, 1),
        "mlp.0.bias": (32,),
        "mlp.2.weight": (12, 32),
        "mlp.2.bias": (12,),
    }
    assert (bias.c.item(), bias.L_multiplier.item(), bias.init_L.item()) == (
        pytest.approx(0.1),
        1.0,
        512.0,
    )
    assert not bias.init_L.requires_grad


def test_function_is_interpolated_within_the_stated_error():
    def function(x):
        return torch.stack([-3 * x**2, torch.sin(6 * x), torch.exp(-4 * x)])

    for error in (0.1, 1e-3, 1e-5):
        bias = NormalizedBias.from_function(function, HEADS, error=error, init_length=9)
        x = torch.rand(1, 1, 1000, dtype=torch.float64).expand(1, HEADS, -1)
        form = bias.lower(Geometry(20, 20), torch.float64, None)
        found = (form.function(x)[0] - function(x[0, 0])).abs().max()
        assert found <= error
        assert found > error / 100  # not more samples than are needed
    straight = NormalizedBias.from_function(lambda x: 1 - 2 * x, HEADS)
    assert straight.lower(Geometry(5, 5), torch.float64, None).knots.shape == (1, 1, 1)


@pytest.mark.parametrize("lengths", [(30, 30), (200, 20), (20, 200)])
def test_keys_after_the_query_are_within_the_sampled_range(lengths):
    n_query, n_key = lengths
    bias = NormalizedBias.from_function(lambda x: torch.cos(4 * x), 1, error=1e-3, init_length=2)
    positions = torch.arange(n_key - n_query, n_key)
    distance = (positions[:, None] - torch.arange(n_key)).abs()
    scale = torch.log1p(0.1 * positions.clamp(min=2)) + 1e-6
    expected = torch.cos(4 * torch.log1p(0.1 * distance) / scale[:, None])
    assert (bias.dense(*lengths)[0] - expected).abs().max() < 1e-3


def test_functions_are_trained():
    module = nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, HEADS), nn.Softplus())
    with pytest.warns(UserWarning, match="reads module, a Sequential that is not among the param"):
        bias = NormalizedBias.from_function(lambda x: module.double()(x).mT, HEADS)
    assert not [name for name, _ in bias.named_parameters() if "function" in name]
    held = NormalizedBias.from_function(module.double(), 1)
    assert "function.1.weight" in dict(held.named_parameters())
    bias.dense(9, 9).sum().backward()
    assert all(x.grad.abs().sum() > 0 for x in module.parameters())
    assert bias.c.grad.abs() > 0


def test_receptive_field_is_infinite():
    assert FIRE(2).receptive_field(0.01).tolist() == [float("inf")] * 2
    with pytest.raises(ValueError, match="eps must be in"):
        FIRE(2).receptive_field(1.5)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: FIRE(2, width=0), ValueError, "width must be positive"),
        (lambda: FIRE(2, init_c=0.0), ValueError, "init_c must be positive"),
        (lambda: FIRE(2, init_length="long"), TypeError, "init_length must be a number"),
        (lambda: NormalizedBias.from_function(3, 2), TypeError, "function must be callable"),
        (
            lambda: NormalizedBias.from_function(torch.sin, 2, error=0),
            ValueError,
            "error must be positive",
        ),
        (
            lambda: NormalizedBias.from_function(lambda x: x[:2], 2).dense(3, 3),
            ValueError,
            r"function returned \(2,\) for 5 arguments; it must return a tensor of shape",
        ),
        (
            lambda: NormalizedBias.from_function(lambda x: (x > 0.3).double(), 2).dense(3, 3),
            ValueError,
            "function deviates by 0.5 from its interpolation between 1024 samples",
        ),
        (lambda: NormalizedBias(2).dense(3, 3), NotImplementedError, r"must define pieces\(\)"),
    ],
)
def test_errors_name_the_argument(make, error, message):
    with pytest.raises(error, match=message):
        make()
