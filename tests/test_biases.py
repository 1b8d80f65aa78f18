"""Every bias against its oracle: all pairs, every geometry, the gradients of its parameters."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import oracles
from biased_flash_attn import biases
from biased_flash_attn.biases.base import FunctionBias, PositionBias
from biased_flash_attn.forms import Geometry
from numerics import assert_close_to_float64

HEADS = 3

# id: (bias of HEADS heads, its oracle)
DISTANCE_CASES = {
    "alibi": (lambda: biases.ALiBi(HEADS), oracles.alibi()),
    "alibi-shift": (lambda: biases.ALiBi(HEADS, shift=-3), oracles.alibi(shift=-3)),
    "alibi-equal": (lambda: biases.ALiBi(HEADS, exponent=4), oracles.alibi(exponent=4)),
    "alibi-trained": (lambda: biases.ALiBi(HEADS, trainable=True), oracles.alibi_trained),
    "kerple_log": (lambda: biases.KerpleLog(HEADS), oracles.kerple_log),
    "kerple_power": (lambda: biases.KerplePower(HEADS), oracles.kerple_power),
    "sandwich": (lambda: biases.Sandwich(HEADS), oracles.sandwich()),
    "sandwich-16": (lambda: biases.Sandwich(HEADS, dbar=16), oracles.sandwich(16)),
    "sandwich-code": (
        lambda: biases.Sandwich(HEADS, first_frequency=0),
        oracles.sandwich(first=0),
    ),
    "sandwich-trained": (lambda: biases.Sandwich(HEADS, trainable=True), oracles.sandwich()),
    "smoothed_sandwich": (lambda: biases.SmoothedSandwich(HEADS), oracles.smoothed_sandwich),
    "type1": (lambda: biases.Type1(HEADS), oracles.type1),
    "type2": (lambda: biases.Type2(HEADS), oracles.type2),
    "inverse_distance": (lambda: biases.InverseDistance(HEADS), oracles.inverse_distance),
    "inverse_log_distance": (
        lambda: biases.InverseLogDistance(HEADS),
        oracles.inverse_log_distance,
    ),
    "t5": (lambda: biases.T5(HEADS), oracles.t5()),
    "t5-both": (lambda: biases.T5(HEADS, bidirectional=True), oracles.t5(bidirectional=True)),
    "t5-small": (
        lambda: biases.T5(HEADS, num_buckets=6, max_distance=9),
        oracles.t5(num_buckets=6, max_distance=9),
    ),
    "clipped_table": (lambda: biases.ClippedTable(HEADS, 4), oracles.clipped_table(4)),
    "function": (
        lambda: biases.DistanceBias.from_function(lambda d: -torch.log1p(d), HEADS),
        oracles.inverse_distance,
    ),
}

DIM = 5
CONTEXT_CASES = {
    "cable": (lambda: biases.Cable(DIM, HEADS), oracles.cable()),
    "cable-softplus": (
        lambda: biases.Cable(DIM, HEADS, activation="softplus", weighted=False),
        oracles.cable(oracles.softplus, weighted=False),
    ),
    "cable_nw": (lambda: biases.CableNW(DIM, HEADS), oracles.cable(weighted=False)),
    "kernelized_cable": (lambda: biases.KernelizedCable(DIM, HEADS), oracles.cable(kernel=True)),
    "forget_gate": (lambda: biases.ForgetGate(DIM, HEADS), oracles.forget_gate),
}

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


def cases(table):
    return pytest.mark.parametrize("case", table.values(), ids=table.keys())


geometries = pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES.keys())


def drawn(bias: nn.Module) -> nn.Module:
    """The bias in float64 with fresh parameters, all of them where no limit holds them."""
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


def check_gradients(bias: nn.Module, parameters, actual, exact) -> None:
    """The same random combination of all entries has the same gradients both ways."""
    weights = torch.randn_like(exact)
    (actual * weights).sum().backward()
    (exact * weights).sum().backward()
    for name, value in bias.named_parameters():
        assert_close_to_float64(value.grad, parameters[name].grad, None, f"gradient of {name}")


def test_every_shipped_bias_has_an_oracle():
    assert set(biases.DISTANCE_BIASES) <= set(DISTANCE_CASES)
    assert set(biases.CONTEXT_BIASES) <= set(CONTEXT_CASES)
    for name, make in biases.DISTANCE_BIASES.items():
        assert type(make(HEADS)) is type(DISTANCE_CASES[name][0]())
    for name, make in biases.CONTEXT_BIASES.items():
        assert type(make(DIM, HEADS)) is type(CONTEXT_CASES[name][0]())


@cases(DISTANCE_CASES)
@pytest.mark.parametrize(("n_query", "n_key"), [(13, 13), (3, 40), (9, 4)])
def test_dense_distance_bias_is_the_papers(case, n_query, n_key):
    make, oracle = case
    bias = drawn(make())
    parameters = leaves(bias)
    actual = bias.dense(n_query, n_key)
    exact = expected_distance(oracle, parameters, n_query, n_key)
    assert_close_to_float64(actual, exact, None, "dense")
    if parameters:
        check_gradients(bias, parameters, actual, exact)


@cases(DISTANCE_CASES)
@geometries
def test_lowered_distance_bias_is_the_papers(case, geometry):
    make, oracle = case
    bias = drawn(make())
    form = bias.lower(geometry, torch.float32, torch.device("cpu"))
    assert form.terms.dtype == torch.float32
    assert form.gain is None
    exact = expected_distance(oracle, leaves(bias), geometry.n_query, geometry.n_key)
    exact = torch.where(geometry.visible(), exact, 0).detach()
    actual = torch.where(geometry.visible(), form.dense(geometry)[0], 0).expand_as(exact)
    assert_close_to_float64(actual.float(), exact, exact.float(), form.name)


@cases(CONTEXT_CASES)
@pytest.mark.parametrize(("n_query", "n_key"), [(7, 7), (3, 7)])
def test_dense_context_bias_is_the_papers(case, n_query, n_key):
    make, oracle = case
    bias = drawn(make())
    parameters = leaves(bias)
    x = torch.randn(2, n_key, DIM, dtype=torch.float64)
    x_ours, x_theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    actual = bias(x_ours).dense(n_query, n_key)
    exact = expected_context(oracle, parameters, x_theirs, n_query, n_key)
    assert_close_to_float64(actual, exact, None, "dense")
    check_gradients(bias, parameters, actual, exact)
    assert_close_to_float64(x_ours.grad, x_theirs.grad, None, "gradient of x")


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

    exact = torch.stack(
        [
            oracles.every_pair(
                oracles.cumulative(steps, gain if gained else None, kernel is not None, b),
                HEADS,
                n_query,
                n_key,
            )
            for b in range(2)
        ]
    )
    actual = form.dense(geometry)
    assert_close_to_float64(actual, exact, None, form.name)
    assert_close_to_float64(bias.dense(n_query, n_key), exact, None, "dense")

    inputs = (steps, gain) if gained else (steps,)
    weights = torch.randn_like(exact)
    ours = torch.autograd.grad((actual * weights).sum(), inputs)
    theirs = torch.autograd.grad((exact * weights).sum(), inputs)
    for name, got, wanted in zip(("steps", "gain"), ours, theirs, strict=False):
        assert_close_to_float64(got, wanted, None, f"gradient of {name}")


def test_gains_of_all_keys_stand_for_those_of_the_last_queries():
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
def test_geometry_is_what_its_docstring_says(n_query, n_key, causal, window):
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


def test_alibi_slopes_of_twelve_heads_are_the_published_ones():
    form = biases.ALiBi(12).lower(Geometry(1, 1), torch.float64, torch.device("cpu"))
    exponents = [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]
    exact = torch.tensor([[2**-h for h in exponents]], dtype=torch.float64)
    assert_close_to_float64(form.slopes, exact, None, "slopes")


@pytest.mark.parametrize("num_heads", [1, 2, 3, 5, 8, 20, 32, 71])
def test_alibi_slopes_follow_the_authors_recursion(num_heads):
    form = biases.ALiBi(num_heads).lower(Geometry(1, 1), torch.float64, torch.device("cpu"))
    exact = torch.tensor([oracles.published_slopes(num_heads)], dtype=torch.float64)
    assert_close_to_float64(form.slopes, exact, None, "slopes")


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (64, 1000)])
def test_t5_buckets_are_the_published_ones(bidirectional, num_buckets, max_distance):
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
    # The authors clamp what is stored, then take gradients there.
    parameters = {
        "r1": bias.r1.detach().clamp(0.01).requires_grad_(),
        "r2": bias.r2.detach().clamp(0.01, 2).requires_grad_(),
    }
    exact = oracles.every_pair(
        lambda h, p, j: oracles.kerple_power(parameters, 2, h, p, j), 2, 5, 5
    )
    actual = bias.dense(5, 5)
    assert_close_to_float64(actual, exact, None, "dense")
    check_gradients(bias, parameters, actual, exact)


def test_function_gets_signed_distances_only_when_asked():
    kinds = {signed: [] for signed in (False, True)}
    for signed, given_to in kinds.items():
        bias = biases.DistanceBias.from_function(
            lambda d, given_to=given_to: given_to.extend(d.tolist()) or -d, 1, signed=signed
        )
        bias.dense(3, 3)
    assert kinds == {False: [2, 1, 0, 1, 2], True: [-2, -1, 0, 1, 2]}


def test_a_module_may_be_the_function_and_is_trained():
    class Curve(nn.Module):
        def __init__(self):
            super().__init__()
            self.rate = nn.Parameter(torch.rand(HEADS, 1))

        def forward(self, d):
            return -self.rate * d.sqrt()

    bias = biases.DistanceBias.from_function(Curve(), HEADS)
    bias.lower(Geometry(4, 4), torch.float32, torch.device("cpu")).table.sum().backward()
    distances = torch.tensor([0, 1, 2, 3], dtype=torch.float64)
    exact = -distances.sqrt().sum().expand(HEADS, 1)
    (rate,) = bias.parameters()
    assert_close_to_float64(rate.grad, exact, exact.float(), "gradient")


def test_one_curve_for_all_heads_is_lowered_to_one_row():
    form = biases.Type1(8).lower(Geometry(4, 4), torch.float32, torch.device("cpu"))
    assert form.table.shape == (1, 1, 4)
    assert biases.Type1(8).dense(4, 4).shape == (8, 4, 4)


def test_distant_cosines_keep_their_angle():
    geometry = Geometry(1, 1_000_000)
    bias = biases.Sandwich(1, dbar=8)
    table = bias.lower(geometry, torch.float32, torch.device("cpu")).table[0]
    far = [999_999, 876_543, 654_321]
    exact = [
        (math.fsum(math.cos(d / 10 ** (4 * 2 * i / 8)) for i in (1, 2, 3, 4)) - 4) / 8 for d in far
    ]
    exact = torch.tensor([exact], dtype=torch.float64)
    assert_close_to_float64(table[:, far], exact, exact.float(), "cosines")


def test_sums_of_many_steps_are_exact():
    steps = torch.rand(1, 1, 50_000)
    bias = biases.CumulativeBias(steps)
    form = bias.lower(Geometry(1, 50_000), torch.float32, torch.device("cpu"))
    exact = torch.tensor(
        [[list(itertools.accumulate(steps.flatten().tolist()))]], dtype=torch.float64
    )
    assert form.sums.dtype == torch.float64
    assert_close_to_float64(form.sums, exact, None, "sums")


@cases(CONTEXT_CASES)
def test_autocast_does_not_reach_into_the_sums(case):
    make, _ = case
    bias, x = make(), torch.randn(2, 6, DIM)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = bias(x)
    plain = bias(x)
    assert torch.equal(cast.dense(6, 6), plain.dense(6, 6))


@cases(CONTEXT_CASES)
def test_hidden_states_in_bfloat16_are_projected_in_float32(case):
    make, _ = case
    bias, x = make().bfloat16(), torch.randn(2, 6, DIM).bfloat16()
    half = bias(x)
    assert half.steps.dtype == torch.float32
    assert torch.equal(half.dense(6, 6), bias.float()(x.float()).dense(6, 6))


@pytest.mark.parametrize("name", ["alibi", "sandwich", "type2"])
def test_casting_a_model_leaves_fixed_biases_exact(name):
    make = biases.DISTANCE_BIASES[name]
    assert torch.equal(make(12).bfloat16().dense(5, 5), make(12).dense(5, 5))


@cases(DISTANCE_CASES)
def test_only_a_bias_without_parameters_is_remembered(case):
    make, _ = case
    bias, cpu = make(), torch.device("cpu")
    short, long = Geometry(6, 6), Geometry(6, 9)
    first = bias.lower(short, torch.float32, cpu).terms
    if list(bias.parameters()):
        before = first.clone()
        with torch.no_grad():
            for parameter in bias.parameters():
                parameter += 1
        assert not torch.equal(bias.lower(short, torch.float32, cpu).terms, before)
    elif not isinstance(bias, FunctionBias):
        assert bias.lower(short, torch.float32, cpu).terms is first
        unused = make()
        assert torch.equal(
            bias.lower(long, torch.float32, cpu).terms,
            unused.lower(long, torch.float32, cpu).terms,
        )
    assert bias.lower(short, torch.float64, cpu).terms.dtype == torch.float64


def test_a_function_is_never_remembered():
    rate = torch.ones(())
    bias = biases.DistanceBias.from_function(lambda d: -rate * d, 1)
    settings = (Geometry(4, 4), torch.float32, torch.device("cpu"))
    before = bias.lower(*settings).table
    rate.fill_(2)
    assert torch.equal(bias.lower(*settings).table, 2 * before)


@pytest.mark.parametrize("name", ["alibi", "sandwich"])
def test_what_inference_mode_remembered_serves_training(name):
    bias, geometry = biases.DISTANCE_BIASES[name](HEADS), Geometry(5, 5)
    settings = (geometry, torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        bias.lower(*settings)
    weight = torch.ones((), requires_grad=True)
    (weight * bias.lower(*settings).terms).sum().backward()
    assert weight.grad == bias.lower(*settings).terms.sum()


@cases(DISTANCE_CASES | CONTEXT_CASES)
def test_lowering_compiles_into_one_graph(case):
    make, _ = case
    bias, geometry = make(), Geometry(4, 6)
    x = torch.randn(2, 6, DIM)
    contextual = not isinstance(bias, PositionBias)

    def lowered():
        made = bias(x) if contextual else bias
        form = made.lower(geometry, torch.float32, torch.device("cpu"))
        return form.terms if form.gain is None else form.terms.sum() * form.gain

    torch.compiler.reset()
    compiled = torch.compile(lowered, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(), lowered())

    parameters = list(bias.parameters())
    if parameters:
        ours = torch.autograd.grad(compiled().square().sum(), parameters)
        eager = torch.autograd.grad(lowered().square().sum(), parameters)
        for got, wanted in zip(ours, eager, strict=True):
            assert_close_to_float64(got, wanted.double(), None, "gradient")
