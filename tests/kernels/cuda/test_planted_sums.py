"""Faults planted in the gradients of sums of steps and of gains, which the emulator must find."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cuda.backend import EMULATED, MARKS, attend, check
from tests.kernels.cuda.planted import SETTINGS, WRONG, Planted
from tests.support.cases import Case
from tests.support.problems import check_beyond_float32, drawn

pytestmark = [*MARKS, pytest.mark.skipif(not EMULATED, reason="faults may hang a GPU")]

SUMS = "bias_sums.cuh"
OF_SUMS = [
    Planted("sums have one part of each gain", {WRONG}, SUMS, "kLimbs = 3", "kLimbs = 1"),
    Planted("parts repeat the largest", {WRONG}, SUMS, "x -= rounded;"),
    Planted("gains are not divided by their unit", {WRONG}, SUMS, ".gain * inverse", ".gain"),
    Planted("sums have no unit", {WRONG}, SUMS, "sum.x += unit *", "sum.x +="),
    Planted(
        "gradients of other keys are written",
        {"race", "out of bounds", WRONG},
        SUMS,
        " && key < count",
    ),
]
LARGE = SETTINGS | {"batch": 1, "causal": True, "trained": True}
OF_LARGE_SUMS = [
    Planted(
        "large sums of steps are separated",
        {WRONG},
        "forms/cumulative.cuh",
        "block.problem.causal && !__any_sync(~0u, is_large)",
        "block.problem.causal",
    ),
    Planted("large sums of steps are rounded", {WRONG}, SUMS, "sum_gains(sums, grad_s, numbers);"),
    Planted("sums precede those of all lanes", {"race"}, SUMS, "__syncwarp();"),
]


@pytest.fixture
def terms_cancel():
    """Returns a function that checks that the gradient of the first step, which shifts all sums
    equally, is nearly 0."""
    problem = drawn(Case("cumulative-gain", torch.bfloat16, (140, 140), (64, 64), (5, 5), batch=1))

    def do_cancel() -> None:
        gradient = check(problem)["gradient of steps"]
        residual = gradient[..., 0].abs() / gradient.square().mean(-1).sqrt()
        assert residual.median() <= 2**-12

    return do_cancel


def test_terms_of_sums_cancel(terms_cancel):
    terms_cancel()


@pytest.mark.parametrize("planted", OF_SUMS, ids=lambda x: x.name)
def test_fault_of_sums_is_found(planted, first_fault, terms_cancel):
    assert first_fault(planted, terms_cancel) in planted.expected


@pytest.fixture
def large_step_is_exact():
    """Returns a function that checks all results next to a step that exceeds all others."""
    problem = drawn(Case("cumulative-gain", torch.float16, (100, 130), **LARGE))
    with torch.no_grad():
        problem.bias.steps[..., 70] = -1e9
        problem.bias.gain.abs_()
    return lambda: check_beyond_float32(problem, attend)


def test_large_steps_in_a_tile_are_exact(large_step_is_exact):
    large_step_is_exact()


@pytest.mark.parametrize("planted", OF_LARGE_SUMS, ids=lambda x: x.name)
def test_fault_of_large_sums_is_found(planted, first_fault, large_step_is_exact):
    assert first_fault(planted, large_step_is_exact) in planted.expected
