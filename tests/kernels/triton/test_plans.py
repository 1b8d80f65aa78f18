"""Plans in the Triton kernels: the keys that they use, and the order of programs."""

from __future__ import annotations

import heapq

import pytest
import torch
from torch import Tensor

from biased_flash_attn import attention_plan, backends
from biased_flash_attn.attention import lowered
from biased_flash_attn.forms import Geometry, NoBias
from biased_flash_attn.forms.gradients import OWN
from biased_flash_attn.problem import Problem
from tests.kernels.triton.backend import KERNELS, MARKS, attend
from tests.skipping.test_trim import check_nonfinite_values_disable_trimming, trimmed
from tests.support.cases import Case
from tests.support.problems import drawn, naive

pytestmark = MARKS
TILE = 128


def random_plan(case: Case, heads: int) -> Tensor:
    """Random key ranges of the tiles of queries, whose beginnings and ends never decrease."""
    n_key, tiles = case.lengths[1], (case.lengths[0] + TILE - 1) // TILE
    first, end = torch.randint(0, n_key + 1, (2, case.batch, heads, tiles))
    first, end = (n_key - first) // 2, n_key - end // 2
    plan = torch.stack([first.sort(-1).values, end.sort(-1).values])
    if case.causal:
        plan[1] = n_key
    return plan.int()


def kept_mask(plan: Tensor, geometry: Geometry) -> Tensor:
    first, end = plan[..., torch.arange(geometry.n_query) // TILE, None]
    j = torch.arange(geometry.n_key)
    return (first <= j) & (j < end)


def exact(problem, plan: Tensor) -> dict[str, Tensor]:
    """o and the gradients in float64, over the plan's keys."""
    problem = problem.double()
    case = problem.case
    shown = case.geometry.visible() & kept_mask(plan, case.geometry)
    group = case.heads[0] // case.heads[1]
    k, v = (x.repeat_interleave(group, 1) for x in (problem.k, problem.v))
    dense = problem.dense()
    s = problem.scale * problem.q @ k.mT + (0 if dense is None else dense)
    s = s.masked_fill(~shown, -torch.inf)
    empty = ~shown.any(-1, keepdim=True)
    p = s.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    o = p @ v
    leaves = problem.leaves()
    grads = torch.autograd.grad(o, leaves.values(), problem.grad_o, allow_unused=True)
    return {"o": o, **{f"gradient of {name}": x for name, x in zip(leaves, grads, strict=True)}}


def ours(problem, plan: Tensor, name: str) -> dict[str, Tensor]:
    """The same, by a backend."""
    backend, case, bias = backends.get(name), problem.case, problem.called_bias()
    form = lowered(bias, problem.q, case.geometry)
    operands = problem.q, problem.k, problem.v, form, case.geometry
    call = Problem(*operands, problem.scale, 0.0, name, plan).detached()
    o, lse = backend.forward(call)
    results = o, lse, problem.grad_o, torch.zeros_like(lse)
    targets = [OWN] * len(form.tensors) if case.trained else []
    *grads, of_form = backend.backward(call, *results, targets=targets)
    found = {"o": o, **{f"gradient of {n}": x for n, x in zip("qkv", grads, strict=True)}}
    if own := problem.trained():
        of_own = torch.autograd.grad(form.tensors, list(own.values()), of_form)
        found |= {f"gradient of {n}": x for n, x in zip(own, of_own, strict=True)}
    return found


# Norms of errors, relative to those of the results.
ERRORS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize(
    "bias",
    [
        *("none", "linear", "kerple_log", "distance", "cumulative-gain", "log1p_square"),
        *("linear-fixed", "cumulative-gain-fixed"),
    ],
)
def test_skipped_keys_do_not_affect_results(bias, causal, drawn_dtype):
    window = 150 if bias == "linear" else None
    bias, fixed, _ = bias.partition("-fixed")
    settings = {"causal": causal, "window": window, "trained": not fixed}
    case = Case(bias, drawn_dtype, (290, 330), heads=(2, 1), batch=1, **settings)
    print(case)
    check_plan(drawn(case), random_plan(case, 2), "triton")


def check_plan(problem, plan: Tensor, backend: str) -> None:
    """Checks that a backend uses exactly the plan's keys."""
    truth, found = exact(problem, plan), ours(problem, plan, backend)
    assert found.keys() == truth.keys()
    for name, x in found.items():
        # Gradients of a bias's parameters are sums over many queries, with cancellation.
        allowed = 20 if name not in ("o", *map("gradient of {}".format, "qkv")) else 2
        error = (x.double() - truth[name]).norm() / truth[name].norm()
        assert error <= allowed * ERRORS[problem.q.dtype], (name, error)


def test_calls_skip_provably_negligible_keys():
    case = Case("type2", torch.float16, (1100, 1100), heads=(1, 1), batch=1)
    problem = drawn(case)
    plan = attention_plan(problem.q, problem.k, problem.bias, backend="triton")
    assert plan.fraction < 0.7
    o, _ = attend(problem)
    error = (o.double() - naive(problem.double())[0]).abs().max()
    assert error <= 2**-11 * problem.v.abs().max()


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
    made = KERNELS.plans.of_queries(call, block)
    work = (begin + block if causal else end) - first
    assert sorted(made.order.tolist()) == list(range(work.numel()))
    lower_bound = max(work.sum().item() / 132, work.max().item())
    assert makespan(work.flatten()[made.order.long()].tolist(), 132) <= 1.05 * lower_bound
    if not causal:  # blocks of a head cost the same, and the grid's order starts the longest late
        assert makespan(work.flip(1).T.flatten().tolist(), 132) > 1.2 * lower_bound
