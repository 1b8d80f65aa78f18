"""A step that separates two documents does not affect the precision within them."""

from __future__ import annotations

import functools

import pytest
import torch

from biased_flash_attn import KVCache, biases
from biased_flash_attn.forms import Geometry
from biased_flash_attn.shared_constants import LARGEST_STEP
from tests.decoding.cases import decoded
from tests.support.cases import Case
from tests.support.numerics import assert_close_to_float64
from tests.support.problems import Problem, drawn, evaluate, fused, magnitudes, naive

N, FIRST = 130, 70  # tokens of both documents, and the first one of the second
RESETS = pytest.mark.parametrize("reset", [-1e15, -1e30, -torch.inf])


def documents(bias: str, dtype: torch.dtype, reset: float, causal: bool = True) -> Problem:
    problem = drawn(Case(bias, dtype, (N, N), heads=(4, 2), batch=1, causal=causal))
    with torch.no_grad():
        problem.bias.steps.abs_().neg_()[..., FIRST] = reset
        if problem.bias.gain is not None:
            problem.bias.gain.abs_().add_(0.1)
    return problem


def apart(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Naive attention within each document."""
    results = []
    for tokens in (slice(0, FIRST), slice(FIRST, N)):
        own = Problem(**vars(problem))
        own.q, own.k, own.v = (x[:, :, tokens] for x in (problem.q, problem.k, problem.v))
        length = tokens.stop - tokens.start
        own.case = Case(**{**vars(problem.case), "lengths": (length, length)})
        steps, gain = problem.bias.steps[..., tokens], problem.bias.gain
        gain = None if gain is None else gain[..., tokens]
        given = biases.CumulativeBias(steps, gain, problem.bias.kernel)
        own.bias = given
        results.append(naive(own))
    return tuple(torch.cat(parts, 2) for parts in zip(*results, strict=True))


def check(problem: Problem, found: dict[str, torch.Tensor]) -> None:
    before = problem.double()
    exact, sums = evaluate(before, apart), magnitudes(before, problem.q.dtype)
    # After a reset, sums in float64 are rounded relative to it.
    rounded = LARGEST_STEP if problem.q.dtype == torch.float64 else 0
    for name, x in found.items():
        assert_close_to_float64(x, exact[name], None, name, sums[name] + rounded)


@RESETS
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("bias", ["cumulative", "cumulative-gain"])
def test_documents_are_those_of_separate_calls(bias, causal, reset, drawn_dtype, backend):
    dtypes = [torch.float64, torch.float32] if backend == "cpu" else [drawn_dtype]
    for dtype in dtypes:
        problem = documents(bias, dtype, reset, causal)
        check(problem, evaluate(problem, functools.partial(fused, backend=backend)))


@RESETS
@pytest.mark.parametrize("bias", ["cumulative", "cumulative-gain"])
def test_documents_decode_as_in_separate_calls(bias, reset, drawn_dtype, backend):
    if backend == "cuda":
        pytest.skip("it has no kernels for decoding")
    dtype = torch.float32 if backend == "cpu" else drawn_dtype
    problem = documents(bias, dtype, reset)
    cache = KVCache(1, 2, 16, 16, dtype=dtype)
    found = decoded(problem, cache, [50, 19, 2, 1], backend)
    check(problem, dict(zip(("o", "lse"), found, strict=True)))


def test_sums_are_exact_after_thousands_of_resets():
    steps = torch.rand(1, 1, 1 << 15, dtype=torch.float64)
    resets = torch.arange(0, 1 << 15, 8)
    steps[..., resets] = -torch.inf
    sums = Geometry(1, 1 << 15).prefix_sums(steps)
    within = steps.view(1, 1, -1, 8)[..., 1:].cumsum(-1)
    found = sums.view(1, 1, -1, 8)[..., 1:] - sums.view(1, 1, -1, 8)[..., :1]
    assert (found - within).abs().max() < 2**-19


def test_a_saturated_step_has_no_gradient_and_nan_propagates():
    steps = torch.tensor([[[0.5, -torch.inf, -1.0, 2 * LARGEST_STEP]]], requires_grad=True)
    sums = Geometry(4, 4).prefix_sums(steps)
    (gradient,) = torch.autograd.grad(sums.sum(), steps)
    assert gradient.flatten().tolist() == [4, 0, 2, 0]
    sums = Geometry(3, 3).prefix_sums(torch.tensor([[[1.0, torch.nan, 1.0]]]))
    assert sums.isnan().flatten().tolist() == [False, True, True]
