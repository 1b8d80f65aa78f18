"""Checks that keys that ranks do not send have negligible weight."""

from __future__ import annotations

from dataclasses import replace

import torch

from biased_flash_attn import biases
from biased_flash_attn.distributed import Traffic
from tests.distributed.problems import attend, caught, check_summed
from tests.support.biases import Steps
from tests.support.cases import Case
from tests.support.problems import drawn, evaluate, naive

# Decreasing biases, over so many keys that tiles of other ranks are skipped.
SKIPPED = [
    Case(bias, lengths=(1024, 1024), batch=1, heads=(2, 1), causal=causal)
    for bias in ("linear", "distance", "cumulative", "cumulative-gain", "log1p_square")
    for causal in (True, False)
]


def decaying(case: Case):
    """A problem of SKIPPED, in which distant keys have negligible weight."""
    problem, (heads, _) = drawn(replace(case, bias="none")), case.heads
    if case.bias == "linear":
        problem.bias = biases.ALiBi(heads, exponent=1.5, trainable=True)
    elif case.bias == "distance":
        problem.bias = biases.DistanceBias.from_function(lambda d: -0.3 * d, heads)
    else:
        squared = case.bias == "log1p_square"
        steps = torch.rand(1, heads, case.lengths[0]) * (1e6 if squared else -1)
        gain = 1 + torch.rand_like(steps) if case.bias.endswith("gain") else None
        problem.bias = Steps(steps, gain, "log1p_square" if squared else None)
    return problem


def check_skipped(case: Case) -> None:
    """Errors are below float32's rounding, but there are fewer bytes than without skipping."""
    problem, traffic, whole = decaying(case), Traffic(), Traffic()
    evaluate(problem, lambda problem: attend(problem, traffic=whole, tolerance=0.0))
    check_summed(problem, lambda problem: attend(problem, traffic=traffic))
    assert traffic.total < 0.75 * whole.total, (traffic, whole)


def check_tolerance(case: Case) -> None:
    """Skipped keys hold at most the tolerance."""
    problem, tolerance = decaying(case).double(), 0.05
    with torch.no_grad():
        o, lse = attend(problem, tolerance=tolerance)
        exact = naive(problem)
    assert (exact[1] - lse).abs().max() <= tolerance
    assert (lse - exact[1]).max() <= 1e-9
    group = problem.q.shape[1] // problem.v.shape[1]
    span = (problem.v.amax(2) - problem.v.amin(2)).repeat_interleave(group, 1)
    assert ((o - exact[0]).abs() <= tolerance * span[:, :, None] + 1e-9).all()


def check_needle(case: Case) -> None:
    """An early key that outweighs its distance for late queries is fetched from its rank."""
    problem = decaying(case)
    with torch.no_grad():
        lift = -1.2 * problem.dense()[..., -1, 100].min()
        along = torch.nn.functional.normalize(torch.randn(case.dims[0]), dim=0)
        problem.k[:, :, 100] = problem.q[:, :, -300:] = along * (lift / problem.scale).sqrt()
    check_summed(problem)


def check_infinity(case: Case) -> None:
    """An infinite value affects all queries that see it, at any distance."""
    problem = decaying(case)
    with torch.no_grad():
        problem.v[0, 0, 5, 1] = torch.inf
        o, _ = attend(problem)
    assert not o[0, :, 5:, 1].isfinite().any()
    assert o[0, :, :, 0].isfinite().all()


def skipped(seed: str) -> dict[str, list[str]]:
    causal = [case for case in SKIPPED if case.causal]
    return {
        "exact": [caught(check_skipped, case, seed) for case in SKIPPED],
        "tolerance": [caught(check_tolerance, case, seed) for case in SKIPPED],
        "needle": [caught(check_needle, case, seed) for case in causal],
        "infinity": [caught(check_infinity, case, seed) for case in causal],
    }
