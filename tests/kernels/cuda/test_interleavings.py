"""Results have the same bits in every interleaving of warps and blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.cuda.backend import EMULATED, MARKS, attend
from tests.support.cases import Case
from tests.support.problems import Problem, drawn, evaluate

pytestmark = [*MARKS, pytest.mark.skipif(not EMULATED, reason="a GPU chooses its interleaving")]

RESIDENT = [1, 2, 3, 8, None]  # clusters that run side by side


@pytest.fixture
def results(emulated_hopper, monkeypatch):
    """Returns a function that computes o, lse and all gradients with these seeds."""
    driver = emulated_hopper.driver

    def computed(
        problem: Problem, seed: int, approximation_seed: int, resident: int | None
    ) -> dict[str, Tensor]:
        monkeypatch.setattr(driver, "seed", seed)
        monkeypatch.setattr(driver, "approximation_seed", approximation_seed)
        monkeypatch.setattr(driver, "resident", resident)
        return evaluate(problem, attend)

    return computed


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bias", ["linear", "cumulative-gain", "distance"])
def test_results_do_not_depend_on_the_interleaving(bias, causal, seed, results):
    case = Case(bias, torch.bfloat16, (300, 300), (64, 64), (2, 1), batch=1, causal=causal)
    problem = drawn(case)
    first = results(problem, seed, seed, 1)
    assert set(first) == {"o", "lse", *(f"gradient of {name}" for name in problem.leaves())}
    for n, resident in enumerate(RESIDENT):
        again = results(problem, seed + n + 1, seed, resident)
        assert [name for name in first if not torch.equal(first[name], again[name])] == []
    # The approximations' errors are in these bits.
    other = results(problem, seed, seed + 1, 1)
    assert not torch.equal(first["lse"], other["lse"])
