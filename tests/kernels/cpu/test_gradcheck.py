"""torch.autograd.gradcheck of the float64 kernels, whose numerical derivatives need no formula."""

from __future__ import annotations

import pytest
import torch

from tests.support.biases import FORMS
from tests.support.cases import Case
from tests.support.problems import drawn, fused

MASKS = {
    "causal": {},
    "decoding": {"lengths": (3, 6)},
    "more-queries": {"lengths": (6, 4)},
    "window": {"window": 2},
    "both": {"causal": False},
    "both-window": {"causal": False, "window": 2, "lengths": (4, 6)},
}


def gradcheck(case: Case, **options) -> bool:
    problem = drawn(case)
    # Finite differences of lse are meaningless where it is -inf.
    first = max(0, case.lengths[0] - case.lengths[1])

    def attend(*_):
        o, lse = fused(problem)
        return o, lse[:, :, first:]

    # gradcheck perturbs these tensors in place.
    return torch.autograd.gradcheck(attend, tuple(problem.leaves().values()), **options)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bias", FORMS)
def test_gradients_are_numerical_derivatives(bias, mask):
    settings = {"lengths": (5, 5), "dims": (2, 3), "heads": (2, 1), "scale": 0.8} | MASKS[mask]
    assert gradcheck(Case(bias, torch.float64, **settings))


@pytest.mark.parametrize("bias", FORMS)
def test_gradients_across_tiles_are_numerical_derivatives(bias):
    """Along random directions, since there are many inputs."""
    case = Case(bias, torch.float64, lengths=(80, 140), dims=(3, 2), window=90)
    assert gradcheck(case, fast_mode=True)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_fire_are_numerical_derivatives(causal):
    """Some queries are before the threshold L, and others after it."""
    problem = drawn(Case("fire", torch.float64, (6, 8), (2, 3), batch=1, causal=causal))
    with torch.no_grad():
        for x in problem.bias.mlp.parameters():
            x.normal_()
        problem.bias.init_L.fill_(4.6)
    trained = problem.trained()
    assert {"c", "L_multiplier"} < set(trained)
    assert torch.autograd.gradcheck(lambda *_: fused(problem), tuple(trained.values()))
