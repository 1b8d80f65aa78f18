"""The precision of the CUDA kernels where products in float32 would be too inexact."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.kernels.cpu.test_precision import (
    cancellation_residual,
    check_beyond_float32,
    one_large_step,
)
from tests.kernels.cuda.backend import MARKS, attend, check
from tests.sequences.packed_cases import PaddedCase, drawn_padded, padded
from tests.support.cases import Case
from tests.support.problems import drawn, evaluate

pytestmark = MARKS


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("bias", ["cumulative", "cumulative-gain"])
def test_query_and_key_terms_cancel_in_step_gradients(bias, causal):
    assert cancellation_residual(attend, bias, (64, 64), causal) <= 2**-12


@pytest.mark.parametrize("step", [-1e3, -1e9])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("bias", ["cumulative", "cumulative-gain", "log1p_square"])
def test_steps_next_to_a_large_one_are_exact(bias, causal, step):
    case = Case(bias, torch.float16, (100, 130), (64, 64), (4, 2), batch=1, causal=causal)
    check_beyond_float32(one_large_step(case, step), attend)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
def test_distances_of_minus_infinity_are_masked(causal):
    settings = {"batch": 1, "causal": causal, "trained": False}
    problem = drawn(Case("distance", torch.bfloat16, (100, 100), (64, 64), (4, 2), **settings))
    table = problem.bias
    d = torch.arange(table.r.shape[1]) - table.origin
    table.r[:, (d.abs() >= 40) | (d == 3)] = -torch.inf
    check(problem)


@pytest.mark.parametrize("bias", ["none", "linear", "cumulative-gain"])
def test_padding_does_not_affect_results(bias):
    settings = {"dims": (64, 64), "padding": ((7, 3), (0, 120))}
    problem = drawn_padded(PaddedCase(bias, torch.float16, (150, 150), **settings))
    call = functools.partial(padded, backend="cuda")
    exact = evaluate(problem, call)
    with torch.no_grad():
        for x in (problem.q, problem.k, problem.v, problem.grad_o, problem.grad_lse):
            x.transpose(1, 2)[~problem.case.mask] = torch.nan
    for name, x in evaluate(problem, call).items():
        assert torch.equal(x, exact[name]), name
