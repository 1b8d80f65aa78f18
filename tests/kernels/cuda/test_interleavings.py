"""Results have the same bits in every interleaving of warps and blocks."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from biased_flash_attn.cuda_kernels.variants import BLOCK_M
from tests.kernels.cuda.backend import EMULATED, MARKS, attend
from tests.support.cases import Case
from tests.support.plans import PlannedCase, planned, random_plan
from tests.support.problems import Problem, drawn, evaluate

pytestmark = [*MARKS, pytest.mark.skipif(not EMULATED, reason="a GPU chooses its interleaving")]

RESIDENT = [1, 2, 3, 8, None]  # clusters that run side by side


@pytest.fixture
def do_not_depend_on_it(emulated_hopper, monkeypatch, seed):
    """Returns a function that compares o, lse and all gradients in several interleavings."""
    driver = emulated_hopper.driver

    def results(
        problem: Problem, attend, other: int, approximations: int, resident: int | None
    ) -> dict[str, Tensor]:
        monkeypatch.setattr(driver, "seed", seed + other)
        monkeypatch.setattr(driver, "approximation_seed", seed + approximations)
        monkeypatch.setattr(driver, "resident", resident)
        return evaluate(problem, attend)

    def check(problem: Problem, attend=attend) -> None:
        first = results(problem, attend, 0, 0, 1)
        assert set(first) == {"o", "lse", *(f"gradient of {name}" for name in problem.leaves())}
        for n, resident in enumerate(RESIDENT):
            again = results(problem, attend, n + 1, 0, resident)
            assert [name for name in first if not torch.equal(first[name], again[name])] == []
        # The approximations' errors are in these bits.
        other = results(problem, attend, 0, 1, 1)
        assert not torch.equal(first["lse"], other["lse"])

    return check


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bias", ["linear", "cumulative-gain", "distance"])
def test_results_do_not_depend_on_the_interleaving(bias, causal, do_not_depend_on_it):
    case = Case(bias, torch.bfloat16, (300, 300), (64, 64), (2, 1), batch=1, causal=causal)
    do_not_depend_on_it(drawn(case))


@pytest.mark.parametrize("bias", ["none", "cumulative-gain", "distance"])
def test_results_of_wide_heads_do_not_depend_on_it(bias, do_not_depend_on_it):
    """Two blocks of keys add to the tiles of all queries."""
    dims = (128, 64)
    case = Case(bias, torch.float16, (90, BLOCK_M + 70), dims, (2, 1), batch=1)
    do_not_depend_on_it(drawn(case))


@pytest.mark.parametrize("bias", ["linear", "cumulative-gain"])
def test_results_of_a_plan_do_not_depend_on_it(bias, do_not_depend_on_it):
    """Blocks of keys start in another order than that of their heads."""
    case = Case(bias, torch.float16, (100, 3 * BLOCK_M), (64, 64), (4, 2), batch=1)
    problem = drawn(case)
    problem.case = PlannedCase(**vars(case), plan=random_plan(case, some_empty=False))
    do_not_depend_on_it(problem, functools.partial(planned, backend="cuda"))
