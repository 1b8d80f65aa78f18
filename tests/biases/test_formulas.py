"""Every bias compared with its oracle: all pairs, geometries, and gradients of parameters."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from biased_flash_attn import biases
from biased_flash_attn.forms import Geometry
from tests.biases.cases import CONTEXT_CASES, DIM, DISTANCE_CASES, HEADS, cases
from tests.support import oracles
from tests.support.numerics import assert_close_to_float64

GEOMETRIES = {
    "causal": Geometry(9, 9),
    "decoding": Geometry(2, 9),
    "more-queries": Geometry(9, 4),
    "window": Geometry(9, 9, window=3),
    "wide-window": Geometry(5, 9, window=20),
    "both-sides": Geometry(9, 9, causal=False),
    "both-sides-window": Geometry(6, 9, causal=False, window=2),
    "one": Geometry(1, 1, causal=False),
}


geometries = pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES.keys())


def drawn(bias: nn.Module) -> nn.Module:
    """The bias in float64 with random parameters within their limits."""
    for parameter in bias.double().parameters():
        nn.init.uniform_(parameter, 0.05, 1.9)
    return bias


def leaves(bias: nn.Module) -> oracles.Parameters:
    return {
        name: value.detach().clone().requires_grad_() for name, value in bias.named_parameters()
    }


def expected_distance(oracle, parameters, n_query: int, n_key: int) -> torch.Tensor:
    return oracles.every_pair(
        lambda h, p, j: oracle(parameters, HEADS, h, p, j), HEADS, n_query, n_key
    )


def expected_context(oracle, parameters, x, n_query: int, n_key: int) -> torch.Tensor:
    sequences = [
        oracles.every_pair(
            lambda h, p, j, row=row: oracle(parameters, row, h, p, j), HEADS, n_query, n_key
        )
        for row in x
    ]
    return torch.stack(sequences)


def check_gradients(ours, theirs, actual, exact, sizes) -> None:
    """The same random combination of all entries has the same gradients in both, with respect to
    our tensors and theirs, by name. sizes, of the same tensors, increase with all absolute values.
    """
    weights = torch.randn_like(exact)
    found, expected, terms = (
        torch.autograd.grad((x * w).sum(), [of[name] for name in theirs], retain_graph=True)
        for x, w, of in (
            (actual, weights, ours),
            (exact, weights, theirs),
            (sizes, weights.abs(), theirs),
        )
    )
    for name, *result, of_terms in zip(theirs, found, expected, terms, strict=True):
        assert_close_to_float64(*result, None, f"gradient of {name}", of_terms)


def test_every_shipped_bias_has_an_oracle():
    assert set(biases.POSITION_BIASES) <= set(DISTANCE_CASES)
    assert set(biases.CONTEXT_BIASES) <= set(CONTEXT_CASES)
    for name, make in biases.POSITION_BIASES.items():
        assert type(make(HEADS)) is type(DISTANCE_CASES[name][0]())
    for name, make in biases.CONTEXT_BIASES.items():
        assert type(make(DIM, HEADS)) is type(CONTEXT_CASES[name][0]())


@cases(DISTANCE_CASES)
@pytest.mark.parametrize(("n_query", "n_key"), [(13, 13), (3, 40), (9, 4)])
def test_dense_distance_biases_follow_the_papers(case, n_query, n_key):
    make, oracle = case
    bias = drawn(make())
    parameters = leaves(bias)
    actual = bias.dense(n_query, n_key)
    exact = expected_distance(oracle, parameters, n_query, n_key)
    # Each entry is a product, or a sum of terms of one sign, since parameters are positive.
    assert_close_to_float64(actual, exact, None, "dense", exact.abs())
    if parameters:
        check_gradients(dict(bias.named_parameters()), parameters, actual, exact, exact)


@cases(DISTANCE_CASES)
@geometries
def test_lowered_distance_biases_follow_the_papers(case, geometry):
    make, oracle = case
    bias = drawn(make())
    form = bias.lower(geometry, torch.float32, torch.device("cpu"))
    assert {tensor.dtype for tensor in form.tensors} == {torch.float32}
    exact = expected_distance(oracle, leaves(bias), geometry.n_query, geometry.n_key)
    exact = torch.where(geometry.visible(), exact, 0).detach()
    actual = torch.where(geometry.visible(), form.dense(geometry)[0], 0).expand_as(exact)
    assert_close_to_float64(actual.float(), exact, exact.float(), form.name, exact.abs())


@cases(CONTEXT_CASES)
@pytest.mark.parametrize(("n_query", "n_key"), [(7, 7), (3, 7)])
def test_dense_context_biases_follow_the_papers(case, n_query, n_key):
    make, oracle = case
    bias = drawn(make())
    parameters = leaves(bias)
    x = torch.randn(2, n_key, DIM, dtype=torch.float64)
    x_ours, x_theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    actual = bias(x_ours).dense(n_query, n_key)
    exact = expected_context(oracle, parameters, x_theirs, n_query, n_key)
    # Steps increase or decrease with the projections, whose terms have the sign of x.
    sizes = sum(
        expected_context(oracle, parameters, sign * x_theirs.abs(), n_query, n_key).abs()
        for sign in (1, -1)
    )
    assert_close_to_float64(actual, exact, None, "dense", sizes)
    ours = dict(bias.named_parameters())
    check_gradients(ours | {"x": x_ours}, parameters | {"x": x_theirs}, actual, exact, sizes)


def test_cable_is_initialized_with_the_given_deviation():
    bias = biases.Cable(2000, HEADS, bias=True, init=0.02)
    for layer in (bias.w_c, bias.w_s):
        assert abs(layer.weight.std() - 0.02) < 0.002
        assert (layer.bias == 0).all()


@pytest.mark.parametrize("kernel", [None, "log1p_square"])
@pytest.mark.parametrize("gained", [False, True])
@geometries
def test_cumulative_bias_sums_the_steps_between_two_positions(geometry, gained, kernel):
    n_query, n_key = geometry.n_query, geometry.n_key
    steps = torch.randn(2, HEADS, n_key, dtype=torch.float64, requires_grad=True)
    gain = torch.randn(2, HEADS, n_query, dtype=torch.float64, requires_grad=True)
    bias = biases.CumulativeBias(steps, gain if gained else None, kernel)
    form = bias.lower(geometry, torch.float64, torch.device("cpu"))
    assert form.name == (kernel or "cumulative")

    inputs = {"steps": steps} | ({"gain": gain} if gained else {})
    entries = [
        oracles.cumulative(steps, inputs.get("gain"), kernel is not None, b) for b in range(2)
    ]
    exact = torch.stack([oracles.every_pair(x, HEADS, n_query, n_key) for x in entries])
    # Sums start at the first key. log(1 + x^2) is at most |x|, and its slope at most 1.
    sizes = steps.abs().sum(-1)[..., None, None].expand_as(exact)
    if gained:
        sizes = sizes * gain.abs()[..., None]
    actual = form.dense(geometry)
    assert_close_to_float64(actual, exact, None, form.name, sizes)
    assert_close_to_float64(bias.dense(n_query, n_key), exact, None, "dense", sizes)
    check_gradients(inputs, inputs, actual, exact, sizes)


def test_gains_per_key_are_selected_for_the_last_queries():
    steps, gain = torch.randn(2, HEADS, 8), torch.randn(1, HEADS, 8)
    by_key = biases.CumulativeBias(steps, gain).dense(3, 8)
    by_query = biases.CumulativeBias(steps, gain[..., 5:]).dense(3, 8)
    assert by_key.shape == (2, HEADS, 3, 8)
    assert torch.equal(by_key, by_query)


@given(
    n_query=st.integers(1, 12),
    n_key=st.integers(1, 12),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 15),
)
def test_geometry_follows_its_docstring(n_query, n_key, causal, window):
    geometry = Geometry(n_query, n_key, causal, window)
    visible, pair_distances = geometry.visible(), geometry.pair_distances()
    seen = []
    for i, j in itertools.product(range(n_query), range(n_key)):
        p = i + n_key - n_query
        assert pair_distances[i, j] == p - j
        sees = (not causal or j <= p) and (window is None or p - j < window)
        assert visible[i, j] == sees
        if sees:
            seen.append(p - j)
    distances = geometry.distances()
    assert len(distances) == geometry.n_distances
    assert distances[0] == geometry.first_distance == min(seen)
    assert distances[-1] == max(seen)


def test_alibi_slopes_of_twelve_heads_equal_the_published_ones():
    form = biases.ALiBi(12).lower(Geometry(1, 1), torch.float64, torch.device("cpu"))
    exponents = [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]
    exact = torch.tensor([[2**-h for h in exponents]], dtype=torch.float64)
    assert_close_to_float64(form.slopes, exact, None, "slopes", exact)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 5, 8, 20, 32, 71])
def test_alibi_slopes_follow_the_authors_recursion(num_heads):
    form = biases.ALiBi(num_heads).lower(Geometry(1, 1), torch.float64, torch.device("cpu"))
    exact = torch.tensor([oracles.published_slopes(num_heads)], dtype=torch.float64)
    assert_close_to_float64(form.slopes, exact, None, "slopes", exact)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (64, 1000)])
def test_t5_buckets_equal_the_published_ones(bidirectional, num_buckets, max_distance):
    bias = biases.T5(1, num_buckets, max_distance, bidirectional)
    reach = 2 * max_distance
    d = torch.arange(-reach, reach + 1, dtype=torch.float64)
    published = [
        oracles.t5_bucket(ahead, bidirectional, num_buckets, max_distance)
        for ahead in range(reach, -reach - 1, -1)
    ]
    assert bias.bucket(d).tolist() == published


@pytest.mark.parametrize("limits", [(-1.0, 3.0), (0.005, 0.3)], ids=["beyond", "small"])
def test_kerple_parameters_stay_in_range_and_keep_their_gradients(limits):
    low, high = limits
    bias = biases.KerplePower(2).double()
    with torch.no_grad():
        bias.r1.copy_(torch.tensor([low, high]))
        bias.r2.copy_(torch.tensor([high, low]))
    # The authors clamp the stored parameters, and compute gradients there.
    parameters = {
        "r1": bias.r1.detach().clamp(0.01).requires_grad_(),
        "r2": bias.r2.detach().clamp(0.01, 2).requires_grad_(),
    }
    exact = oracles.every_pair(
        lambda h, p, j: oracles.kerple_power(parameters, 2, h, p, j), 2, 5, 5
    )
    actual = bias.dense(5, 5)
    assert_close_to_float64(actual, exact, None, "dense", exact.abs())
    ours = dict(bias.named_parameters())
    check_gradients(ours, parameters, actual, exact, exact)


@pytest.mark.parametrize(
    "slopes", [(0.5, 0.25), torch.tensor([0.5, 0.25])], ids=["tuple", "tensor"]
)
def test_slopes_determine_the_number_of_heads(slopes):
    bias = biases.ALiBi(slopes=slopes)
    assert bias.num_heads == 2
    assert torch.equal(bias.dense(4, 4), biases.ALiBi(2, slopes=slopes).dense(4, 4))
    with pytest.raises(TypeError, match="num_heads must be an int, not None"):
        biases.ALiBi()
