"""What the kernels of every backend must do, on inputs that reveal mistakes of kernels."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from biased_flash_attn import attention_plan
from tests.sequences.packed_cases import PaddedCase, drawn_padded, padded
from tests.support.cases import Case
from tests.support.plans import PlannedCase, planned, random_plan
from tests.support.problems import (
    check_beyond_float32,
    check_problem,
    drawn,
    evaluate,
    fused,
    naive,
)

BOTH_MASKS = pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])


@pytest.fixture
def attend(backend):
    return functools.partial(fused, backend=backend)


@BOTH_MASKS
def test_distances_of_minus_infinity_are_masked(causal, attend):
    settings = {"heads": (4, 2), "batch": 1, "causal": causal}
    problem = drawn(Case("distance", torch.bfloat16, (100, 100), **settings))
    table = problem.bias
    d = torch.arange(table.r.shape[1]) - table.origin
    hidden = (d.abs() >= 40) | (d == 3)
    with torch.no_grad():
        table.r[:, hidden] = -torch.inf
    ours = check_problem(problem, attend)
    assert (ours["gradient of r"][:, hidden] == 0).all()


@pytest.mark.parametrize("step", [-1e3, -1e9])
@BOTH_MASKS
@pytest.mark.parametrize("bias", ["cumulative", "cumulative-gain", "log1p_square"])
def test_steps_next_to_a_large_one_are_exact(bias, causal, drawn_dtype, step, backend, attend):
    """The large step is in the middle of a tile, as between two documents or at a closed gate."""
    dtype = torch.float32 if backend == "cpu" else drawn_dtype
    problem = drawn(Case(bias, dtype, (100, 130), heads=(4, 2), batch=1, causal=causal))
    with torch.no_grad():
        problem.bias.steps[..., 70] = step
        if problem.bias.gain is not None:
            problem.bias.gain.abs_()  # a penalty, not a logit too large for float32
    check_beyond_float32(problem, attend)


@BOTH_MASKS
@pytest.mark.parametrize("dims", [(16, 16), (80, 80)], ids=str)
@pytest.mark.parametrize("bias", ["cumulative", "cumulative-gain"])
def test_query_and_key_terms_cancel_in_step_gradients(bias, dims, causal, attend):
    """The first step shifts all sums equally, so that its gradient is 0: the terms of a pair in the
    sums of its query and of its key cancel, unless they are rounded differently. Such errors would
    accumulate in the gradients of all steps, which are sums over later queries and keys. If two
    products of tiles differ in the last bit, a pair halfway between two numbers is also rounded
    differently, in some of the heads.
    """
    case = Case(bias, torch.bfloat16, (140, 140), dims, (5, 5), batch=1, causal=causal)
    gradient = evaluate(drawn(case), attend)["gradient of steps"]
    residual = gradient[..., 0].abs() / gradient.square().mean(-1).sqrt()
    assert residual.median() <= 2**-12


@pytest.mark.parametrize("bias", ["none", "linear", "distance", "cumulative-gain"])
def test_padding_does_not_affect_results(bias, backend):
    # For the CUDA kernels, a sequence with a block that is all padding.
    n, after = (150, 120) if backend == "cuda" else (50, 20)
    case = PaddedCase(bias, torch.float16, lengths=(n, n), padding=((7, 3), (0, after)))
    problem = drawn_padded(case)
    attend = functools.partial(padded, backend=backend)
    exact = evaluate(problem, attend)
    with torch.no_grad():
        for x in (problem.q, problem.k, problem.v, problem.grad_o, problem.grad_lse):
            x.transpose(1, 2)[~case.mask] = torch.nan
    for name, x in evaluate(problem, attend).items():
        assert torch.equal(x, exact[name]), name


@pytest.mark.parametrize(
    "bias",
    [
        *("linear", "linear-batch", "distance", "cumulative-gain", "log1p_square-gain"),
        *("relative-rank3-fixed", "relative_last-rank3-fixed"),
    ],
)
def test_biases_of_one_head_are_those_of_all(bias, drawn_dtype, attend):
    bias, fixed, _ = bias.partition("-fixed")
    case = Case(bias, drawn_dtype, (40, 70), heads=(4, 2), batch=1, trained=not fixed)
    problem = drawn(case)
    problem.bias = drawn(replace(case, heads=(1, 1))).bias
    check_problem(problem, attend)


@BOTH_MASKS
@pytest.mark.parametrize(
    "bias",
    [
        *("none", "linear", "kerple_log", "distance", "cumulative-gain", "log1p_square"),
        *("linear-fixed", "cumulative-gain-fixed", "relative-rank3-fixed"),
    ],
)
def test_skipped_keys_do_not_affect_results(bias, causal, drawn_dtype, backend):
    window = 150 if bias == "linear" else None
    bias, fixed, _ = bias.partition("-fixed")
    settings = {"causal": causal, "window": window, "trained": not fixed}
    case = Case(bias, drawn_dtype, (290, 330), heads=(2, 1), batch=1, **settings)
    problem = drawn(case)
    problem.case = PlannedCase(**vars(case), plan=random_plan(case, some_empty=False))
    check_problem(problem, functools.partial(planned, backend=backend))


def test_calls_skip_provably_negligible_keys(backend, attend):
    problem = drawn(Case("type2", torch.float16, (1100, 1100), heads=(1, 1), batch=1))
    with torch.no_grad():
        plan = attention_plan(problem.q, problem.k, problem.bias, backend=backend)
        o, _ = attend(problem)
    assert plan.fraction < 0.7
    error = (o.double() - naive(problem.double())[0]).abs().max()
    assert error <= 2**-11 * problem.v.abs().max()
