"""Lowering of biases to forms: functions, precision, caching and compilation."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pytest
import torch
from torch import nn

from biased_flash_attn import biases
from biased_flash_attn.biases.distance import FunctionBias, PositionBias
from biased_flash_attn.forms import Geometry
from tests.biases.cases import CONTEXT_CASES, DIM, DISTANCE_CASES, HEADS, cases
from tests.support.numerics import assert_close_to_float64


def test_functions_receive_signed_distances_only_on_request():
    kinds = {signed: [] for signed in (False, True)}
    for signed, given_to in kinds.items():
        bias = biases.DistanceBias.from_function(
            lambda d, given_to=given_to: given_to.extend(d.tolist()) or -d, 1, signed=signed
        )
        bias.dense(3, 3)
    assert kinds == {False: [2, 1, 0, 1, 2], True: [-2, -1, 0, 1, 2]}


def test_functions_may_be_trained_modules():
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
    assert_close_to_float64(rate.grad, exact, exact.float(), "gradient", exact.abs())


def test_one_curve_for_all_heads_is_lowered_to_one_row():
    form = biases.Type1(8).lower(Geometry(4, 4), torch.float32, torch.device("cpu"))
    assert form.table.shape == (1, 1, 4)
    assert biases.Type1(8).dense(4, 4).shape == (8, 4, 4)


def test_cosines_of_large_distances_are_exact():
    geometry = Geometry(1, 1_000_000)
    bias = biases.Sandwich(1, dbar=8)
    table = bias.lower(geometry, torch.float32, torch.device("cpu")).table[0]
    far = [999_999, 876_543, 654_321]
    exact = [
        (math.fsum(math.cos(d / 10 ** (4 * 2 * i / 8)) for i in (1, 2, 3, 4)) - 4) / 8 for d in far
    ]
    exact = torch.tensor([exact], dtype=torch.float64)
    # The absolute values of cosines are at most 1, so that the sum of all terms, over 8, is too.
    terms = torch.ones_like(exact)
    assert_close_to_float64(table[:, far], exact, exact.float(), "cosines", terms)


def test_sums_of_many_steps_are_exact():
    steps = torch.rand(1, 1, 50_000)
    bias = biases.CumulativeBias(steps)
    form = bias.lower(Geometry(1, 50_000), torch.float32, torch.device("cpu"))
    exact = torch.tensor(
        [[list(itertools.accumulate(steps.flatten().tolist()))]], dtype=torch.float64
    )
    assert form.sums.dtype == torch.float64
    assert_close_to_float64(form.sums, exact, None, "sums", exact)


@cases(CONTEXT_CASES)
def test_autocast_does_not_affect_sums(case):
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
def test_casting_a_model_keeps_fixed_biases_exact(name):
    make = biases.DISTANCE_BIASES[name]
    assert torch.equal(make(12).bfloat16().dense(5, 5), make(12).dense(5, 5))


@cases(DISTANCE_CASES)
def test_only_biases_without_parameters_are_cached(case):
    make, _ = case
    bias, cpu = make(), torch.device("cpu")
    short, long = Geometry(6, 6), Geometry(6, 9)
    first = bias.lower(short, torch.float32, cpu).tensors[0]
    if list(bias.parameters()):
        before = first.clone()
        with torch.no_grad():
            for parameter in bias.parameters():
                parameter += 1
        assert not torch.equal(bias.lower(short, torch.float32, cpu).tensors[0], before)
    elif not isinstance(bias, FunctionBias):
        assert bias.lower(short, torch.float32, cpu).tensors[0] is first
        unused = make()
        assert torch.equal(
            bias.lower(long, torch.float32, cpu).tensors[0],
            unused.lower(long, torch.float32, cpu).tensors[0],
        )
    assert bias.lower(short, torch.float64, cpu).tensors[0].dtype == torch.float64


def test_functions_are_never_cached():
    rate = torch.ones(())
    bias = biases.DistanceBias.from_function(lambda d: -rate * d, 1)
    settings = (Geometry(4, 4), torch.float32, torch.device("cpu"))
    before = bias.lower(*settings).table
    rate.fill_(2)
    assert torch.equal(bias.lower(*settings).table, 2 * before)


@pytest.mark.parametrize("name", ["alibi", "sandwich"])
def test_forms_cached_in_inference_mode_allow_training(name):
    bias, geometry = biases.DISTANCE_BIASES[name](HEADS), Geometry(5, 5)
    settings = (geometry, torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        bias.lower(*settings)
    weight = torch.ones((), requires_grad=True)
    (weight * bias.lower(*settings).tensors[0]).sum().backward()
    assert weight.grad == bias.lower(*settings).tensors[0].sum()


@cases(DISTANCE_CASES | CONTEXT_CASES)
def test_lowering_compiles_into_one_graph(case):
    make, _ = case
    bias, geometry = make(), Geometry(4, 6)
    x = torch.randn(2, 6, DIM)
    contextual = not isinstance(bias, PositionBias)

    def lowered():
        made = bias(x) if contextual else bias
        form = made.lower(geometry, torch.float32, torch.device("cpu"))
        return torch.cat([x.flatten() / x.numel() for x in form.tensors])

    torch.compiler.reset()
    compiled = torch.compile(lowered, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(), lowered())

    parameters = list(bias.parameters())
    if parameters:
        ours = torch.autograd.grad(compiled().square().sum(), parameters)
        eager = torch.autograd.grad(lowered().square().sum(), parameters)
        for got, wanted in zip(ours, eager, strict=True):
            assert torch.equal(got, wanted)


@cases(DISTANCE_CASES | CONTEXT_CASES)
def test_biases_can_be_copied(case):
    make, _ = case
    bias = make()
    x = torch.randn(2, 6, DIM)

    def dense(bias):
        return (bias if isinstance(bias, PositionBias) else bias(x)).dense(6, 6)

    copies = [copy.deepcopy(bias), make()]
    copies[1].load_state_dict(bias.state_dict())
    if not isinstance(bias, FunctionBias):
        copies.append(pickle.loads(pickle.dumps(bias)))
    for other in copies:
        assert torch.equal(dense(other), dense(bias))


def test_cached_forms_are_not_pickled():
    bias = biases.Sandwich(32)
    size = len(pickle.dumps(bias))
    bias.lower(Geometry(16384, 16384), torch.float32, torch.device("cpu"))
    assert len(pickle.dumps(bias)) == size
