"""Invariants of attention, on shapes drawn by Hypothesis."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from biased_flash_attn import biases
from tests.support.biases import FORMS
from tests.support.cases import DTYPES, Case
from tests.support.numerics import assert_close_to_float64
from tests.support.problems import check, check_problem, drawn, evaluate, fused, magnitudes, naive


@st.composite
def any_case(draw, **fixed) -> Case:
    kv_heads = draw(st.integers(1, 3))
    settings = {
        "bias": draw(st.sampled_from(list(FORMS))),
        "dtype": draw(st.sampled_from(DTYPES)),
        "lengths": draw(st.tuples(st.integers(1, 200), st.integers(1, 200))),
        "dims": draw(st.tuples(st.integers(1, 70), st.integers(1, 70))),
        "heads": (kv_heads * draw(st.integers(1, 3)), kv_heads),
        "batch": draw(st.integers(1, 3)),
        "causal": draw(st.booleans()),
        "window": draw(st.none() | st.integers(1, 220)),
    }
    return Case(**settings | fixed)


seeds = st.integers(0, 2**32)


@given(case=any_case(), seed=seeds)
@settings(max_examples=60)
def test_any_problem_is_exact(case, seed):
    torch.manual_seed(seed)
    check(case)


@given(case=any_case(), seed=seeds)
@settings(max_examples=15)
def test_sequences_and_heads_are_independent(case, seed):
    """The results of a sequence and a group of heads are bit for bit those of a separate call."""
    torch.manual_seed(seed)
    problem = drawn(dataclasses.replace(case, bias="distance"))
    o, lse = fused(problem)
    group = case.heads[0] // case.heads[1]
    b, kv = case.batch - 1, case.heads[1] - 1
    alone = drawn(dataclasses.replace(case, bias="distance", batch=1, heads=(group, 1)))
    heads = slice(kv * group, (kv + 1) * group)
    alone.q = problem.q[b : b + 1, heads]
    alone.k, alone.v = (x[b : b + 1, kv : kv + 1] for x in (problem.k, problem.v))
    with torch.no_grad():
        alone.bias.r.copy_(problem.bias.r[heads])
    for whole, part in zip((o, lse), fused(alone), strict=True):
        assert torch.equal(whole[b : b + 1, heads], part)


@given(case=any_case(), seed=seeds)
@settings(max_examples=15)
def test_permuted_sequences_and_heads_give_permuted_results(case, seed):
    torch.manual_seed(seed)
    case = dataclasses.replace(case, bias="cumulative-gain", heads=(3, 3))
    problem = drawn(case)
    results = evaluate(problem)
    of_batch, of_heads = torch.randperm(case.batch), torch.randperm(3)

    def permuted(x: Tensor) -> Tensor:
        x = x.detach()[:, of_heads]
        return x if x.shape[0] == 1 else x[of_batch]

    for name in ("q", "k", "v", "grad_o", "grad_lse"):
        x = getattr(problem, name)
        setattr(problem, name, permuted(x).requires_grad_(x.requires_grad))
    for parameter in problem.bias.parameters():
        parameter.data = permuted(parameter)
    # Steps are shared by the sequences: their gradients are summed in another order.
    for name, result in evaluate(problem).items():
        if name != "gradient of steps":
            assert torch.equal(result, permuted(results[name])), name


@given(case=any_case(bias="distance"), seed=seeds, shift=st.floats(-300, 300))
@settings(max_examples=25)
def test_adding_a_constant_to_logits_shifts_only_lse(case, seed, shift):
    """The constant is so large that rounding the bias or lse to a half dtype would be noticed."""
    torch.manual_seed(seed)
    problem = drawn(case)
    truth, baseline = evaluate(problem.double(), naive), evaluate(problem, naive)
    with torch.no_grad():
        problem.bias.r += shift
    raised, sums = evaluate(problem), magnitudes(problem.double(), case.dtype)
    for name, exact in truth.items():
        move = shift if name == "lse" else 0
        same = None if case.dtype == torch.float64 else baseline[name].double() + move
        assert_close_to_float64(raised[name], exact + move, same, name, sums[name])


@given(case=any_case(window=None), seed=seeds, beyond=st.integers(0, 100))
@settings(max_examples=15)
def test_window_of_all_keys_equals_no_window(case, seed, beyond):
    torch.manual_seed(seed)
    problem = drawn(case)
    without = evaluate(problem)
    problem.case = dataclasses.replace(case, window=case.lengths[1] + beyond)
    for name, result in evaluate(problem).items():
        assert torch.equal(result, without[name]), name


@given(
    case=any_case(causal=True, window=None, dims=(4, 4)),
    lengths=st.tuples(st.integers(1, 90), st.integers(200, 400)),
    seed=seeds,
    data=st.data(),
)
@settings(max_examples=40)
def test_later_keys_do_not_affect_earlier_rows(case, lengths, seed, data):
    """Rows are bitwise equal when keys, values and steps after them are replaced."""
    torch.manual_seed(seed)
    case = dataclasses.replace(case, lengths=lengths)
    problem = drawn(case)
    o, lse = fused(problem)
    n_query, n_key = case.lengths
    key = data.draw(st.integers(n_key - n_query, n_key - 1), label="first key replaced")
    with torch.no_grad():
        for x in (problem.k, problem.v):
            x[:, :, key:] = torch.randn(x[:, :, key:].shape)
        if case.bias.startswith(("cumulative", "log1p_square")):
            problem.bias.steps[..., key:] = torch.randn(problem.bias.steps[..., key:].shape)
    before = key - n_key + n_query  # queries with p_i = i + n_key - n_query < key
    for old, new in zip((o, lse), fused(problem), strict=True):
        assert torch.equal(old[:, :, :before], new[:, :, :before])


SLOPES = torch.tensor([2.0 ** -(2 * h) for h in range(1, 5)])  # ALiBi of four heads
STEPS = -SLOPES.expand(1, 190, 4).mT
EQUIVALENT = {
    "function": (
        biases.ALiBi(4),
        biases.DistanceBias.from_function(lambda d: -SLOPES.double()[:, None] * d, 4),
    ),
    "steps": (biases.ALiBi(4), biases.CumulativeBias(STEPS)),
    "gain": (biases.ALiBi(4), biases.CumulativeBias(2 * STEPS, torch.full((1, 4, 150), 0.5))),
    "shift": (biases.ALiBi(4, shift=2), biases.CumulativeBias(STEPS / 4)),
    "kernel": (
        biases.DistanceBias.from_function(
            lambda d: -torch.log1p((SLOPES.double()[:, None] * d) ** 2), 4
        ),
        biases.CumulativeBias(STEPS, kernel="log1p_square"),
    ),
    "nothing": (None, biases.CumulativeBias(0 * STEPS)),
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("one", "other"), EQUIVALENT.values(), ids=EQUIVALENT)
def test_equivalent_forms_give_equal_results(one, other, dtype, causal):
    problem = drawn(Case(dtype=dtype, lengths=(150, 190), heads=(4, 2), causal=causal))
    problem.bias = one

    def attend(problem):
        return fused(dataclasses.replace(problem, bias=other))

    check_problem(problem, attend)


@pytest.mark.parametrize("bias", [name for name in FORMS if name.startswith(("cumul", "log1p"))])
@pytest.mark.parametrize("position", range(60, 200, 9))
def test_later_steps_do_not_affect_earlier_rows(bias, position):
    """A tile's sums are relative to a key that all rows see, so that not even rounding differs."""
    problem = drawn(Case(bias, lengths=(200, 200), dims=(4, 4)))
    o, _ = fused(problem)
    with torch.no_grad():
        problem.bias.steps[..., position:] = torch.randn(problem.bias.steps[..., position:].shape)
    assert torch.equal(o[:, :, :position], fused(problem)[0][:, :, :position])
