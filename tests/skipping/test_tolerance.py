"""How calls use their tolerance: by default, at 0, and if nothing can be skipped."""

from __future__ import annotations

import pytest
import torch

from biased_flash_attn import attention_plan, biased_flash_attn, biases, operators
from biased_flash_attn.forms import Geometry, Linear
from biased_flash_attn.problem import Problem
from biased_flash_attn.skipping import plans
from tests.support.cases import DTYPES

DIM = 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [biases.ALiBi(2, shift=-3), biases.Type2(2)], ids=["alibi", "t2"])
def test_default_tolerance_is_below_the_rounding_of_the_dtype(bias, dtype):
    q, k, v = (torch.randn(1, 2, 8192, 32).to(dtype) for _ in range(3))
    exact, exact_lse = biased_flash_attn(q, k, v, bias, tolerance=0.0, return_lse=True)
    ours, lse = biased_flash_attn(q, k, v, bias, return_lse=True)
    assert attention_plan(q, k, bias).fraction.max() < 0.5
    # Both results are rounded.
    rounding = torch.finfo(dtype).eps * exact.abs().amax(2, keepdim=True)
    assert ((ours - exact).abs() <= 2 * rounding).all()
    assert ((lse - exact_lse).abs() <= 2**-11).all()


def results_and_gradients(q, k, v, bias, plan):
    """o, lse and the gradients of q, k, v and of slopes."""
    slopes = bias.slopes.detach()[None].requires_grad_()
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    geometry = Geometry(q.shape[2], k.shape[2])
    call = Problem(*leaves, Linear(slopes), geometry, DIM**-0.5, 0.0, "cpu", plan)
    o, lse, *_ = operators.forward(call)
    return o, lse, *torch.autograd.grad(o.square().sum() + lse.sum(), (*leaves, slopes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tolerance_0_equals_no_plan(dtype):
    q, k, v = (torch.randn(1, 2, 1100, DIM, dtype=dtype) for _ in range(3))
    bias = biases.ALiBi(2, trainable=True)
    bias.slopes.data = bias.slopes.to(torch.promote_types(dtype, torch.float32))
    o = biased_flash_attn(q, k, v, bias, tolerance=0.0)
    plain = results_and_gradients(q, k, v, bias, None)
    assert torch.equal(o, plain[0])
    whole = plans.full_plan(q, Geometry(1100, 1100))
    for x, y in zip(results_and_gradients(q, k, v, bias, whole), plain, strict=True):
        assert torch.equal(x, y)


def test_operators_receive_the_plan_of_the_call():
    q, k, v = (torch.randn(1, 2, 1100, DIM) for _ in range(3))
    bias = biases.ALiBi(2, shift=-5, trainable=True)
    plan = attention_plan(q, k, bias, tolerance=1e-3)
    assert plan.fraction.max() < 0.6
    o = biased_flash_attn(q, k, v, bias, tolerance=1e-3)
    planned = torch.stack([plan.first_key, plan.end_key])
    assert torch.equal(o, results_and_gradients(q, k, v, bias, planned)[0])


def test_autocast_does_not_affect_plans():
    q, k, v = (torch.randn(1, 2, 2000, DIM) for _ in range(3))
    k += 3000
    form = Linear(torch.tensor([[0.2, 0.1]]))
    call = Problem(q, k, v, form, Geometry(2000, 2000), DIM**-0.5, 1e-2, "cpu")
    plan = operators.planned(call).plan
    assert (plan[0, ..., -1] > 0).all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(operators.planned(call).plan, plan)


@pytest.mark.parametrize("name", ["none", "inverse_distance", "kerple_log"])
def test_biases_that_cannot_skip_need_no_certificate(name, monkeypatch):
    """No kernel is launched before that of the call itself."""
    bias = None if name == "none" else biases.DISTANCE_BIASES[name](2)
    if name == "kerple_log":
        bias.r1.data.fill_(1)

    def work(*arguments):
        raise AssertionError("a certificate was made")

    monkeypatch.setattr("biased_flash_attn.skipping.plans.Certificate.of", work)
    q, k, v = (torch.randn(1, 2, 1100, DIM) for _ in range(3))
    biased_flash_attn(q, k, v, bias)
