"""Attention sinks, as the documentation computes them from the differentiable lse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.sequences.packed_cases import PackedCase, drawn_packed, packed
from tests.support.cases import Case
from tests.support.numerics import assert_same_model
from tests.support.problems import Problem, drawn, fused, naive

FORMS = [
    *("none", "linear", "distance", "cumulative-gain", "log1p_square", "normalized"),
    *("relative", "relative_last", "dense-heads"),
]


def with_sink(o: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """sink: the logit of each query's sink, broadcastable to lse (B, H, Nq)."""
    return o * torch.sigmoid(lse - sink)[..., None].to(o.dtype)


def with_column(problem: Problem, sink: Tensor) -> Tensor:
    """The definition: one more logit per query, with a value vector of 0."""
    _, lse = naive(problem)
    group = problem.q.shape[1] // problem.k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (problem.k, problem.v))
    logits = problem.scale * problem.q @ k.mT
    if (bias := problem.dense()) is not None:
        logits = logits + bias
    logits = logits.masked_fill(~problem.case.geometry.visible(), -torch.inf)
    columns = torch.cat([logits, sink.expand(lse.shape)[..., None]], -1)
    return columns.softmax(-1)[..., :-1] @ v


def gradients(problem: Problem, sink: Tensor, o: Tensor) -> dict[str, Tensor]:
    leaves = {**problem.leaves(), "sink": sink}
    grads = torch.autograd.grad(o, leaves.values(), problem.grad_o)
    return {"o": o.detach(), **dict(zip(leaves, grads, strict=True))}


def check_with_sink(problem: Problem, sink: Tensor, o: Tensor, lse: Tensor) -> None:
    ours = gradients(problem, sink.requires_grad_(), with_sink(o, lse, sink))
    double, exact_sink = problem.double(), sink.detach().double().requires_grad_()
    exact = gradients(double, exact_sink, with_column(double, exact_sink))
    # The gradient of a sink is a sum over channels and queries, whose terms cancel.
    terms = (double.grad_o * exact["o"]).abs().sum((0, 2, 3))
    for name, x in ours.items():
        made_of = terms if name == "sink" else None
        assert_same_model(x, exact[name].to(x.dtype), name, made_of)


@pytest.mark.parametrize("per_query", [False, True], ids=["head", "query"])
@pytest.mark.parametrize("bias", FORMS)
def test_sinks_equal_an_extra_logit(bias, per_query, backend):
    problem = drawn(Case(bias, lengths=(33, 70), heads=(4, 2), window=50))
    sink = torch.randn(2, 4, 33) if per_query else torch.randn(4, 1)
    check_with_sink(problem, sink, *fused(problem, backend))


def test_sinks_of_packed_sequences(backend):
    problem = drawn_packed(PackedCase.of(((40, 70), (3, 3)), bias="linear", heads=(4, 2)))
    check_with_sink(problem, torch.randn(4, 1), *packed(problem, backend))


def test_sink_gradients_are_numerical_derivatives():
    q, k, v = (torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sink = torch.randn(2, 1, dtype=torch.float64, requires_grad=True)
    problem = drawn(Case("linear", torch.float64, (5, 5), (3, 3), batch=1))

    def attend(q, k, v, sink):
        problem.q, problem.k, problem.v = q, k, v
        return with_sink(*fused(problem), sink)

    assert torch.autograd.gradcheck(attend, (q, k, v, sink))
