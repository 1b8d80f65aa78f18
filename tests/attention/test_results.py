"""What every backend computes, compared with float64: outputs and every gradient.

Settings that change nothing but numbers are the same in all tests, so that these share the kernels
that are compiled for GPUs.
"""

from __future__ import annotations

import functools

import pytest
import torch

from tests.support.biases import FORMS, SHIPPED
from tests.support.cases import Case
from tests.support.problems import check, check_problem, drawn, evaluate, fused

HEADS = (4, 2)


@pytest.fixture
def attend(backend):
    return functools.partial(fused, backend=backend)


@pytest.mark.parametrize("bias", SHIPPED)
def test_every_shipped_bias_is_exact(bias, drawn_dtype, attend):
    check(Case(bias, drawn_dtype, lengths=(33, 70), heads=HEADS), attend)


@pytest.mark.parametrize("scale", [0.0, -0.7, 1e-9, 3.0])
@pytest.mark.parametrize("bias", ["none", "linear", "distance", "cumulative-gain"])
def test_any_scale_is_exact(bias, scale, drawn_dtype, attend):
    check(Case(bias, drawn_dtype, lengths=(33, 70), heads=HEADS, scale=scale), attend)


def test_outputs_have_the_layout_of_queries(backend):
    problem = drawn(Case(heads=HEADS, dims=(8, 5), layout="heads_inside"))
    o, _ = fused(problem, backend)
    assert o.transpose(1, 2).is_contiguous()
    o, _ = fused(drawn(Case(heads=HEADS)), backend)
    assert o.is_contiguous()


def test_expanded_cotangents_are_exact(attend):
    problem = drawn(Case("linear", lengths=(33, 70), heads=HEADS))
    problem.grad_o = torch.ones(()).expand_as(problem.grad_o)
    problem.grad_lse = torch.full((), 0.5).expand_as(problem.grad_lse)
    check_problem(problem, attend)


@pytest.mark.parametrize("output", [0, 1], ids=["o", "lse"])
def test_gradients_through_either_output_are_exact(output, attend):
    problem = drawn(Case("cumulative-gain", lengths=(33, 70), heads=HEADS))
    cotangents = [problem.grad_o, problem.grad_lse]
    leaves = problem.leaves().values()
    alone = torch.autograd.grad(
        attend(problem)[output], leaves, cotangents[output], materialize_grads=True
    )

    cotangents[1 - output].zero_()
    both = list(check_problem(problem, attend).values())[2:]
    for of_one, of_two in zip(alone, both, strict=True):
        assert torch.equal(of_one, of_two)


@pytest.mark.parametrize("bias", FORMS)
def test_queries_without_visible_keys_give_zeros(bias, drawn_dtype, attend):
    """With 45 queries more than keys, the first 45 precede the first key."""
    problem = drawn(Case(bias, drawn_dtype, lengths=(70, 25), heads=HEADS))
    problem.grad_o[:, :, :45] = 1e4
    problem.grad_lse[:, :, :45] = -torch.inf
    ours = evaluate(problem, attend)
    assert (ours["o"][:, :, :45] == 0).all()
    assert (ours["lse"][:, :, :45] == -torch.inf).all()
    assert (ours["gradient of q"][:, :, :45] == 0).all()
    assert all(ours[name][:, :, 45:].isfinite().all() for name in ("o", "lse"))

    problem.grad_o[:, :, :45] = 0
    problem.grad_lse[:, :, :45] = 0
    for name, expected in evaluate(problem, attend).items():
        assert torch.equal(ours[name], expected), f"{name} depends on queries without keys"


@pytest.mark.parametrize("bias", FORMS)
@pytest.mark.parametrize(
    ("batch", "lengths"),
    [(0, (5, 5)), (2, (0, 5)), (2, (5, 0)), (2, (0, 0))],
    ids=["no-sequence", "no-query", "no-key", "neither"],
)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
def test_empty_inputs_give_empty_outputs(bias, batch, lengths, causal, attend):
    ours = evaluate(drawn(Case(bias, lengths=lengths, batch=batch, causal=causal)), attend)
    assert ours["o"].shape == (batch, 2, lengths[0], 16)
    assert (ours["o"] == 0).all()
    assert (ours["lse"] == -torch.inf).all()
    assert all((x == 0).all() for name, x in ours.items() if name.startswith("gradient"))
