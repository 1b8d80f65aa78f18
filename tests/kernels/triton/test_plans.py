"""Plans in the Triton kernels: the keys that they use, and the order of programs."""

from __future__ import annotations

import heapq

import pytest
import torch

from biased_flash_attn.forms import Geometry, NoBias
from biased_flash_attn.problem import Problem
from tests.kernels.triton.backend import KERNELS, MARKS
from tests.skipping.test_trim import check_nonfinite_values_disable_trimming, trimmed
from tests.support.cases import Case

pytestmark = MARKS
TILE = 128


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize(
    "bias", ["linear", "kerple_log", "distance", "cumulative-gain", "log1p_square"]
)
def test_trimming_removes_as_much_as_allowed(bias, causal, drawn_dtype):
    window = 150 if bias == "linear" else None
    for lengths, fraction in (((290, 330), 1e-1), ((130, 260), 1e-3)):
        settings = {"heads": (2, 1), "batch": 1, "causal": causal, "window": window}
        case = Case(bias, drawn_dtype, lengths, **settings)
        for from_end in (False,) if causal else (False, True):
            trimmed(case, "triton", fraction, from_end).check()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nonfinite_values_disable_trimming(value):
    check_nonfinite_values_disable_trimming("triton", value)


def makespan(work: list[int], processors: int) -> int:
    """The time at which the last program ends, if each starts on the first free processor."""
    busy = [0] * processors
    for cost in work:
        heapq.heappush(busy, heapq.heappop(busy) + cost)
    return max(busy)


@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
def test_program_order_balances_unequal_heads(causal, heads):
    """ALiBi's heads see from a few keys to all of them. No order can beat the lower bound."""
    n, block = 8192, 128
    window = torch.tensor([min(n, 40 * 2 ** (1 + 8 * h // heads)) for h in range(heads)])[:, None]
    begin = torch.arange(n // TILE) * TILE
    first = (begin - window).clamp(min=0) // 64 * 64
    end = torch.full_like(first, n) if causal else (begin + TILE + window).clamp(max=n)
    plan = torch.stack([first, end])[:, None].int()
    q = torch.zeros(1, heads, n, 16, dtype=torch.float16)
    call = Problem(q, q, q, NoBias(), Geometry(n, n, causal), 1.0, 0.0, "triton", plan)
    made = KERNELS.plans.for_queries(call, block)
    work = (begin + block if causal else end) - first
    assert sorted(made.order.tolist()) == list(range(work.numel()))
    lower_bound = max(work.sum().item() / 132, work.max().item())
    assert makespan(work.flatten()[made.order.long()].tolist(), 132) <= 1.05 * lower_bound
    if not causal:  # blocks of a head cost the same, and the grid's order starts the longest late
        assert makespan(work.flip(1).T.flatten().tolist(), 132) > 1.2 * lower_bound
