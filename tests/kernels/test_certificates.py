"""What skipping reserves for rounding exceeds the errors of every backend's kernels, for biases
whose numbers are large, cancel, or have more bits than the queries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from biased_flash_attn import backends
from biased_flash_attn.forms import (
    Cumulative,
    Distance,
    Form,
    Geometry,
    Linear,
    Normalized,
    Relative,
)
from biased_flash_attn.problem import Problem
from biased_flash_attn.skipping import plans
from biased_flash_attn.skipping.certificate import Certificate, reach
from tests.support.biases import lines_through
from tests.support.cases import DTYPES
from tests.support.plans import kept_mask

HEADS, DIM, TOLERANCE = 2, 16, 1e-2


def slopes(n: int) -> Linear:
    return Linear(torch.tensor([[1e3, 1e-3]]))


def table(n: int) -> Distance:
    """Smooth, as far as its large numbers permit."""
    d = torch.arange(n)
    return Distance(torch.stack([-1e4 * (d / 400).square(), 1e3 * torch.randn(n)])[None])


def steps(n: int, gain: Tensor | None = None) -> Cumulative:
    """A large step up follows each large step down."""
    alternating = 3e5 * (torch.arange(n) % 2 - 0.5)
    return Cumulative((alternating - torch.rand(1, HEADS, n)).double().cumsum(-1), gain)


def steps_with_gain(n: int) -> Cumulative:
    return steps(n, torch.randn(1, HEADS, n))


def steep_lines(n: int) -> Normalized:
    lines = lines_through(torch.linspace(-9, 9, 13).double(), 1e4 * torch.randn(HEADS, 13))
    distances, gain = torch.arange(n).log1p()[None, None], 0.5 + torch.rand(1, 1, n)
    return Normalized(*(x.float() for x in (distances, gain, *lines)))


def vectors(n: int, key_rank: int = 0, beyond: str = "zero") -> Relative:
    terms = ((rank, 30 * torch.randn(1, HEADS, n, rank)) for rank in (24, key_rank))
    pairs = ((x, 30 * torch.randn(1, 1, rank, 200)) for rank, x in terms)
    return Relative(*(x for pair in pairs for x in pair), beyond)


def vectors_of_both(n: int) -> Relative:
    return vectors(n, 8, "last")


FORMS = (slopes, table, steps, steps_with_gain, steep_lines, vectors, vectors_of_both)
NOT_IN_CUDA = (steep_lines, vectors_of_both)


def problem_of(form: Form, n: int, dtype: torch.dtype, backend: str) -> Problem:
    q, k, v = torch.randn(3, 1, HEADS, n, DIM).to(dtype)
    problem = Problem(q, k, v, form, Geometry(n, n), DIM**-0.5, TOLERANCE, backend)
    assert backends.get(backend).refusal(problem) == ""
    return problem


def logits(problem: Problem) -> Tensor:
    """In float64, -inf where invisible."""
    s = problem.scale * problem.q.double() @ problem.k.double().mT
    s = s + problem.form.dense(problem.geometry)
    return s.masked_fill(~problem.geometry.visible(), -torch.inf)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("make", FORMS, ids=lambda make: make.__name__)
def test_mass_of_the_nearest_keys_is_not_overestimated(make, dtype, backend):
    if backend == "cuda" and (dtype == torch.float32 or make in NOT_IN_CUDA):
        pytest.skip("there are no such CUDA kernels")
    problem = problem_of(make(330), 330, dtype, backend)
    _, bound = Certificate.of(problem)
    near = problem.geometry.pair_distances() < reach(problem.geometry)
    exact = logits(problem).masked_fill(~near, -torch.inf).logsumexp(-1)
    assert bound.isfinite().all()
    assert (bound <= exact).all()


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
def test_far_keys_that_conversion_rounds_down_are_not_negligible(dtype, backend):
    """Neighbouring numbers are 32 apart. The biases of far and of near keys are almost equal, but
    are converted to one below and to one above."""
    n, large = 600, 32 / torch.finfo(dtype).eps
    far = torch.arange(n) >= reach(Geometry(n, n))
    columns = torch.where(far, large + 15.9, large + 16.1)[None, None, None]
    absent = torch.zeros(1, 1, n, 0), torch.zeros(1, 1, 0, n)
    form = Relative(torch.ones(1, 1, n, 1), columns, *absent)
    problem = problem_of(form, n, dtype, backend)
    problem.q.zero_()
    s, kept = logits(problem), kept_mask(plans.certified(problem), problem.geometry)
    skipped, rest = (s.masked_fill(x, -torch.inf).logsumexp(-1) for x in (kept, ~kept))
    assert (skipped - rest).exp().max() <= TOLERANCE
