"""What every backend computes, compared with float64: outputs and every gradient.

Settings that change nothing but numbers are the same in all tests, so that these share the kernels
that are compiled for GPUs.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from biased_flash_attn import (
    KVCache,
    biased_flash_attn,
    biased_flash_attn_varlen,
    biased_flash_attn_with_kvcache,
)
from biased_flash_attn.compat import flash_attn_varlen_func
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


@pytest.mark.parametrize("bias", [*SHIPPED, "normalized", "relative", "relative_last"])
def test_every_bias_of_one_head_is_that_of_all(bias, drawn_dtype, attend):
    case = Case(bias, drawn_dtype, lengths=(33, 70), heads=HEADS)
    problem = drawn(case)
    problem.bias = drawn(replace(case, heads=(1, 1))).bias
    check_problem(problem, attend)


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


INTEGERS = [np.int64, np.uint8, torch.tensor, lambda n: torch.tensor([n], dtype=torch.int32)]


@pytest.mark.parametrize("of", INTEGERS, ids=["int64", "uint8", "tensor", "int32 tensor"])
def test_windows_and_lengths_may_be_integers_of_numpy_and_pytorch(of):
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    expected = biased_flash_attn(q, k, v, window=4)
    assert torch.equal(biased_flash_attn(q, k, v, window=of(4)), expected)
    packed, offsets = (
        [x[0].transpose(0, 1) for x in (q, k, v)],
        torch.tensor([0, 9], dtype=torch.int32),
    )
    for call, window in (
        (biased_flash_attn_varlen, {"window": of(4)}),
        (flash_attn_varlen_func, {"window_size": (of(3), of(0))}),
    ):
        o = call(*packed, offsets, offsets, max_seqlen_q=of(9), max_seqlen_k=of(9), **window)
        assert torch.equal(o, expected[0].transpose(0, 1))
    with torch.no_grad():
        cache = KVCache(1, 2, 8, window=of(4))
        torch.testing.assert_close(biased_flash_attn_with_kvcache(q, cache, k, v), expected)


@pytest.mark.parametrize("window", [torch.tensor(True), torch.tensor(4.0), torch.tensor([4, 4])])
def test_other_tensors_are_no_windows(window):
    q = torch.randn(1, 2, 9, 8)
    with pytest.raises(TypeError, match=r"window is tensor.* must be None or a positive int"):
        biased_flash_attn(q, q, q, window=window)
