"""The CPU kernels attend to exactly the keys of a plan, forward and backward."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from biased_flash_attn import attention_plan, backends, biased_flash_attn, biases, operators
from biased_flash_attn.arguments import ATTENTION
from biased_flash_attn.forms import Linear
from biased_flash_attn.forms.gradients import OWN
from biased_flash_attn.problem import Problem
from biased_flash_attn.skipping import plans
from tests.support.biases import FORMS
from tests.support.cases import DTYPES, INSTRUCTION_SETS, Case, pairwise
from tests.support.numerics import assert_close_to_float64
from tests.support.plans import PlannedCase, planned, random_plan
from tests.support.problems import check_problem, drawn, evaluate, magnitudes, naive, with_leaves


def check_with_any_plan(case: Case) -> dict[str, Tensor]:
    problem = drawn(case)
    problem.case = PlannedCase(**vars(case), plan=random_plan(case))
    return check_problem(problem, planned)


COMBINATIONS = pairwise(
    bias=list(FORMS),
    dtype=DTYPES,
    lengths=[(130, 130), (300, 300), (257, 400), (400, 190), (129, 65), (1, 200), (500, 500)],
    dims=[(16, 16), (40, 8), (64, 64)],
    heads=[(1, 1), (4, 2), (3, 1)],
    causal=[True, False],
    window=[None, 5, 64, 150],
    layout=["contiguous", "heads_inside"],
    instruction_set=INSTRUCTION_SETS,
)


@pytest.mark.parametrize(
    ("instruction_set", "case"),
    [(row.pop("instruction_set"), Case(**row)) for row in COMBINATIONS],
    ids=str,
)
def test_gradients_are_those_of_the_computed_pairs(instruction_set, case):
    with backends.instruction_set(instruction_set):
        check_with_any_plan(case)


@pytest.mark.sanitize
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("bias", FORMS)
def test_any_plan_stays_in_bounds(bias, causal):
    check_with_any_plan(Case(bias, lengths=(260, 310), dims=(8, 8), heads=(2, 1), causal=causal))


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (5, 5)], ids=lambda x: "{}x{}".format(*x))
def test_heads_of_unequal_cost_are_exact_and_repeatable(heads, threads):
    torch.set_num_threads(threads)
    case = Case("cumulative-gain", lengths=(700, 700), dims=(32, 32), heads=heads, batch=1)
    problem = drawn(case)
    plan = plans.full_plan(problem.q, case.geometry)
    plan[0, :, 1:] = torch.arange(6).mul(128)  # the first head costs many times the others
    problem.case = PlannedCase(**vars(case), plan=plan)
    first = check_problem(problem, planned)
    for name, x in evaluate(problem, planned).items():
        assert torch.equal(x, first[name]), name


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nonfinite_skipped_keys_do_not_affect_results(value):
    """If a tile contains NaN, those of its queries that do not see it are unaffected."""
    case = Case("linear", lengths=(256, 256), batch=1)
    problem = drawn(case)
    plan = plans.full_plan(problem.q, case.geometry)
    plan[0, ..., 1] = 100  # within a tile, part of which the queries from 128 on skip
    problem.case = PlannedCase(**vars(case), plan=plan)
    with torch.no_grad():  # products of both signs, whose sum with an infinite key is NaN
        problem.q[..., 0].abs_()
        problem.q[..., 1].abs_().neg_()
    clean = problem.double()
    truth, same = evaluate(clean, naive), evaluate(problem, naive)
    sums = magnitudes(clean, case.dtype)
    with torch.no_grad():
        for x in (problem.k, problem.v):
            x[:, :, 90] = value
    poisoned = evaluate(problem, planned)
    for name in ("o", "lse", "gradient of q"):
        for rows in (slice(128, None), slice(90)):
            results = (x[name][:, :, rows] for x in (poisoned, truth, same, sums))
            ours, exact, baseline, terms = results
            assert_close_to_float64(ours, exact, baseline, name, terms)
        assert not poisoned[name][:, :, 90:128].isfinite().any(), name


def test_gradients_of_the_public_call_are_those_of_its_plan():
    case = Case("linear", lengths=(1200, 1200), heads=(4, 2), batch=1)
    problem = drawn(case)
    with torch.no_grad():
        problem.bias.slopes.copy_(torch.tensor([2.0, 0.5, 0.3, 0.01]))
    plan = attention_plan(problem.q, problem.k, problem.bias, tolerance=1e-2)
    assert (plan.fraction[0, :2] < 0.5).all()
    both = torch.stack([plan.first_key, plan.end_key])
    problem.case = PlannedCase(**vars(case), plan=both)

    def attend(problem):
        qkv = problem.q, problem.k, problem.v
        return biased_flash_attn(*qkv, problem.bias, tolerance=1e-2, return_lse=True)

    check_problem(problem, attend)


def test_opcheck_with_a_plan():
    case = Case(lengths=(200, 300), heads=(4, 2))
    problem, slopes = drawn(case), torch.rand(1, 4)
    settings = case.geometry, problem.scale, 1e-3, "cpu"
    call = Problem(problem.q, problem.k, problem.v, Linear(slopes), *settings).detached()
    registered = torch.ops.biased_flash_attn
    torch.library.opcheck(registered.plan.default, ATTENTION.flat(call))
    call = dataclasses.replace(call, plan=registered.plan(*ATTENTION.flat(call)))
    torch.library.opcheck(registered.forward.default, ATTENTION.flat(with_leaves(call)))
    o, _, *softmax = operators.forward(call)
    results = o, *softmax, problem.grad_o, problem.grad_lse
    torch.library.opcheck(registered.backward.default, (*results, [OWN], *ATTENTION.flat(call)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_call_with_a_plan_compiles():
    torch._dynamo.reset()
    bias = biases.ALiBi(2, shift=-5)
    q, k, v = (torch.randn(1, 2, 1100, 8, requires_grad=True) for _ in range(3))
    assert attention_plan(q, k, bias).fraction.max() < 0.8

    def loss(q, k, v):
        return biased_flash_attn(q, k, v, bias).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for ours, exact in zip(
        torch.autograd.grad(compiled(q, k, v), (q, k, v)),
        torch.autograd.grad(loss(q, k, v), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(ours, exact)


def test_a_plan_of_no_queries_or_no_sequences_is_empty():
    case = Case(lengths=(0, 1100), batch=1)
    for changed in (case, dataclasses.replace(case, lengths=(1100, 1100), batch=0)):
        problem = drawn(changed)
        o = biased_flash_attn(problem.q, problem.k, problem.v, biases.ALiBi(2, shift=-5))
        assert o.numel() == 0
        assert attention_plan(problem.q, problem.k, biases.ALiBi(2)).bound.sum() == 0
