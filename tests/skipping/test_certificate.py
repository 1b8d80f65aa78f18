"""Keys are left out only where float64 agrees that they are worth no more than the tolerance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from biased_flash_attn import attention_plan, biases
from biased_flash_attn.forms import Cumulative, Distance, Geometry, Linear, Normalized
from biased_flash_attn.problem import Problem
from biased_flash_attn.shared_constants import PLAN_QUERIES
from biased_flash_attn.skipping import plans
from tests.support.biases import lines_through
from tests.support.cases import DTYPES

DIM = 16


@dataclass
class Call:
    """The arguments of a call, its bias lowered."""

    q: Tensor
    k: Tensor
    v: Tensor
    form: Linear | Distance | Cumulative
    geometry: Geometry
    scale: float = DIM**-0.5

    def plan(self, tolerance: float) -> Tensor:
        operands = self.q, self.k, self.v, self.form, self.geometry
        return plans.certified(Problem(*operands, self.scale, tolerance, "cpu"))

    def logits(self) -> Tensor:
        """In float64, -inf where invisible, (B, H, n_query, n_key)."""
        k = self.k.double().repeat_interleave(self.q.shape[1] // self.k.shape[1], 1)
        s = self.scale * self.q.double() @ k.mT + self.form.dense(self.geometry)
        return s.masked_fill(~self.geometry.visible(), -torch.inf)


def taken(plan: Tensor, geometry: Geometry) -> Tensor:
    """Whether a plan leaves key j to query i, (B, H, n_query, n_key)."""
    tile = torch.arange(geometry.n_query) // PLAN_QUERIES
    first, end = plan[..., tile, None]
    j = torch.arange(geometry.n_key)
    return (first <= j) & (j < end)


def left_out(call: Call, plan: Tensor) -> float:
    """The largest log of what a query leaves out, relative to what it takes."""
    s, kept = call.logits(), taken(plan, call.geometry)
    out, within = s.masked_fill(kept, -torch.inf), s.masked_fill(~kept, -torch.inf)
    ratio = out.logsumexp(-1) - within.logsumexp(-1)
    return torch.where(out.amax(-1) > -torch.inf, ratio, -torch.inf).max().item()


def share(plan: Tensor, geometry: Geometry) -> float:
    """Of the visible pairs, those that are taken."""
    kept, seen = taken(plan, geometry), geometry.visible()
    return ((kept & seen).sum() / (seen.sum() * kept.shape[0] * kept.shape[1])).item()


def linear(heads, geometry):
    return Linear(torch.rand(1, heads).double() ** 2)


def rising(heads, geometry):
    return Linear(-0.1 * torch.rand(1, heads).double())


def rough_table(heads, geometry):
    d = geometry.distances().abs()
    decay = -5 * torch.rand(heads, 1).double() * d ** (0.3 + torch.rand(heads, 1).double())
    return Distance((decay + torch.randn(heads, len(d)).double())[None])


def table_with_far_peak(heads, geometry):
    table = rough_table(heads, geometry).table
    table[..., -1 - torch.randint(table.shape[-1], ())] = 20 * torch.randn(()).double()
    return Distance(table)


def steps(kernel=None, gain=None):
    def make(heads, geometry):
        c = 0.5 * torch.randn(1, heads, geometry.n_key) - torch.rand(1, heads, 1)
        g = gain(1, heads, geometry.n_query) if gain else None
        return Cumulative(c.double().cumsum(-1), g, kernel)

    return make


def pieces(heads, geometry):
    """A function that falls on both sides of 0, not everywhere, of gains of both signs."""
    table = torch.log1p(geometry.distances().abs()) + 0.1 * torch.randn(geometry.n_distances)
    gain = (0.5 + torch.rand(geometry.n_query)) * torch.randint(0, 2, ()).mul(2).sub(1)
    x = torch.linspace(-9, 9, 13).double() + 0.3 * torch.randn(13)
    y = -6 * x.abs() ** (0.5 + torch.rand(heads, 1)) + 3 * torch.randn(heads, 13)
    return Normalized(table[None, None], gain.double()[None, None], *lines_through(x, y))


FORMS = {
    "pieces": pieces,
    "linear": linear,
    "rising": rising,
    "table": rough_table,
    "far peak": table_with_far_peak,
    "cumulative": steps(),
    "positive gain": steps(gain=torch.rand),
    "gain": steps(gain=torch.randn),
    "log1p_square": steps("log1p_square", gain=lambda *shape: 30 * torch.rand(shape)),
}

# What makes content an adversary of the bound: keys far away that win against the bias, a common
# mean that the softmax does not see but norms do, and queries of very different length.
CONTENTS = {
    "plain": lambda q, k: None,
    "common mean": lambda q, k: k.add_(30 * torch.randn(DIM)),
    "huge key": lambda q, k: k[:, :, torch.randint(k.shape[2], ())].mul_(100),
    "aligned key": lambda q, k: k[:, :, 0].copy_(20 * q[:, : k.shape[1], -1]),
    "long query": lambda q, k: q[:, :, torch.randint(q.shape[2], ())].mul_(20),
    "wide": lambda q, k: q.mul_(torch.rand(q.shape[2], 1) * 6),
}


@st.composite
def calls(draw):
    torch.manual_seed(draw(st.integers(0, 2**32)))
    # Lengths at which something can go, most of the time.
    n_key = 64 * draw(st.sampled_from([15, 12, 9, 5, 0])) + draw(st.integers(1, 64))
    n_query = draw(st.sampled_from([n_key, n_key, 700, 130, 1]))
    window = draw(st.sampled_from([None, None, 700, 400, 100, 1]))
    geometry = Geometry(n_query, n_key, draw(st.booleans()), window)
    dtype, kv_heads = draw(st.sampled_from(DTYPES)), draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 2))
    q, k = torch.randn(1, heads, n_query, DIM), torch.randn(1, kv_heads, n_key, DIM)
    CONTENTS[draw(st.sampled_from(list(CONTENTS)))](q, k)
    v = torch.randn(1, kv_heads, n_key, 3)
    name = draw(st.sampled_from(list(FORMS)))
    form = FORMS[name](heads, geometry)
    real = torch.promote_types(dtype, torch.float32)
    if isinstance(form, Cumulative):
        gain = None if form.gain is None else form.gain.to(real)
        form = Cumulative(form.sums, gain, form.kernel)
    else:
        form = form.with_tensors([x.to(real) for x in form.tensors])
    scale = draw(st.sampled_from([DIM**-0.5, DIM**-0.5, 0.05, -0.3, 0.0]))
    call = Call(q.to(dtype), k.to(dtype), v.to(dtype), form, geometry, scale)
    return name, call, 10 ** draw(st.floats(-12, -0.5))


@given(calls())
@settings(max_examples=400)
def test_what_is_left_out_is_worth_no_more_than_the_tolerance(drawn):
    name, call, tolerance = drawn
    plan = call.plan(tolerance)
    if not (computed := share(plan, call.geometry)) < 1:
        return
    event(f"{name}: something is left out")
    assert computed > 0
    assert left_out(call, plan) <= math.log(tolerance)

    # and so the outputs, here in float64, keep what is promised
    s, kept = call.logits(), taken(plan, call.geometry)
    v = call.v.double().repeat_interleave(s.shape[1] // call.v.shape[1], 1)
    exact, without = s.softmax(-1), s.masked_fill(~kept, -torch.inf).softmax(-1)
    error = ((without - exact).nan_to_num() @ v).abs().amax(2)
    spread = v.amax(2) - v.amin(2)
    assert (error <= tolerance * spread + 1e-13 * v.abs().amax(2)).all()


@given(calls())
@settings(max_examples=40)
def test_ranges_of_keys_move_forward_in_whole_tiles(drawn):
    _, call, tolerance = drawn
    first, end = call.plan(tolerance)
    for x in (first, end):
        assert (x.diff() >= 0).all()
    assert (first % 64 == 0).all()
    assert ((end % 64 == 0) | (end == call.geometry.n_key)).all()
    assert (first < end).all()


def drawn_call(form, heads=2, n=900, causal=True, **content) -> Call:
    q, k, v = (torch.randn(1, heads, n, DIM) for _ in range(3))
    for name, change in content.items():
        change({"q": q, "k": k, "v": v}[name])
    geometry = Geometry(n, n, causal)
    form = FORMS[form](heads, geometry)
    if not isinstance(form, Cumulative):
        form = form.with_tensors([x.float() for x in form.tensors])
    return Call(q, k, v, form, geometry)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("name", ["linear", "table", "pieces", "cumulative", "positive gain"])
def test_decay_is_made_use_of(name, causal):
    call = drawn_call(name, causal=causal)
    if name == "linear":
        call.form = Linear(torch.tensor([[0.5, 0.25]]))
    if name == "table":
        call.form = Distance(-(call.geometry.distances().abs()[None, None].float() ** 0.8))
    if name == "pieces":
        table, gain = call.geometry.distances().abs()[None, None], torch.ones(1, 1, 900)
        function = lines_through(torch.tensor([0.0, 50, 900]), torch.tensor([[0.0, -5, -400]] * 2))
        call.form = Normalized(table.float(), gain, *function)
    if name in ("cumulative", "positive gain"):
        gain = None if name == "cumulative" else 0.5 + torch.rand(1, 2, 900)
        call.form = Cumulative(-torch.rand(1, 2, 900).double().cumsum(-1), gain)
    assert share(call.plan(1e-4), call.geometry) < (0.6 if causal else 0.4)
    assert share(call.plan(1e-8), call.geometry) < (0.7 if causal else 0.5)


def test_a_common_mean_of_the_keys_costs_nothing():
    call = drawn_call("linear")
    call.form = Linear(torch.tensor([[0.5, 0.125]]))
    before = share(call.plan(1e-6), call.geometry)
    call.k += 10 * torch.randn(DIM)
    assert share(call.plan(1e-6), call.geometry) == pytest.approx(before, abs=0.03)


def test_nothing_goes_where_far_keys_weigh_most():
    call = drawn_call("rising")
    assert share(call.plan(1e-2), call.geometry) == 1


@pytest.mark.parametrize("sign", [1, -1])
def test_a_huge_key_is_taken_only_by_those_it_attracts(sign):
    call = drawn_call("linear")
    call.form = Linear(torch.full((1, 2), 0.5))
    call.q[..., 0] = 1
    call.k[:, :, 200, 0] = sign * 10**5
    first, _ = call.plan(1e-6)
    assert (first <= 192).all() if sign == 1 else (first[..., -1] >= 768).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["k", "v", "q"])
def test_nothing_goes_where_nothing_is_known(where, value):
    call = drawn_call("linear")
    call.form = Linear(torch.full((1, 2), 0.5))
    assert (call.plan(1e-6)[0, :, :, -1] > 0).all()
    x = getattr(call, where)
    x[0, 1, -1 if where == "q" else 0, 0] = value
    first, _ = call.plan(1e-6)
    assert (first[0, 0, -1] > 0).all()
    assert (first[0, 1] == 0).all()


def test_an_infinite_step_parts_documents():
    call = drawn_call("cumulative", heads=1)
    steps = torch.full((1, 1, 900), -0.01).double()
    steps[..., 500] = -1e4
    call.form = Cumulative(steps.cumsum(-1))
    plan = call.plan(1e-6)
    assert plan[0, 0, 0, 5] == 448  # the query 640, and the tile of the key 500
    assert left_out(call, plan) <= math.log(1e-6)


def test_roundings_are_paid_for():
    """All keys are alike and far from 0: nothing but float32 is between the bound and the truth."""
    for _ in range(30):
        k = (2.0**17 * torch.randint(-3, 4, (DIM,))).expand(1, 1, 900, DIM)
        form = Linear(torch.tensor([[0.1]]))
        call = Call(torch.randn(1, 1, 1, DIM), k, k, form, Geometry(1, 900))
        keep_nearest = torch.tensor([768, 900]).int().reshape(2, 1, 1, 1)
        tolerance = math.exp(left_out(call, keep_nearest)) * (1 - 1e-3)
        assert left_out(call, call.plan(tolerance)) <= math.log(tolerance)


@pytest.mark.parametrize("sign", [1, -1])
def test_sums_that_come_back_bring_their_keys_back(sign):
    call = drawn_call("log1p_square", heads=1, n=896, q=lambda q: q.mul_(0.1))
    steps = sign * torch.ones(1, 1, 896).double()
    steps[..., 448:] *= -1
    steps[..., [0, -1]] = 0  # the last query is where the first key is
    call.form = Cumulative(steps.cumsum(-1), torch.full((1, 1, 896), 1e4), "log1p_square")
    s = call.logits()
    assert s[0, 0, -1, 0] > s[0, 0, -1, 500]
    assert (call.plan(1e-4)[0] == 0).all()
    # without the way back
    call.geometry = Geometry(448, 448)
    call.q, call.k, call.v = (x[:, :, :448] for x in (call.q, call.k, call.v))
    call.form = Cumulative(call.form.sums[..., :448], call.form.gain[..., :448], "log1p_square")
    assert call.plan(1e-4)[0, 0, 0, -1] > 0
    assert left_out(call, call.plan(1e-4)) <= math.log(1e-4)


def of_distance(formula):
    return lambda heads: biases.DistanceBias.from_function(formula, heads)


# The percentages of the table in DESIGN.md at 2^-9 of the values' range: all that may be computed,
# and what the bound alone would leave, which has to do its part.
FRACTIONS = {
    "alibi": (9.4, 18, 8, biases.ALiBi),
    "type2": (3.1, 4, 2, biases.Type2),
    "power": (3.9, 10, 2, of_distance(lambda d: -(d**0.5))),
    "logarithm": (3.6, 100, 2, of_distance(lambda d: -3 * torch.log1p(d))),
    "cable_nw": (
        14.7,
        28,
        8,
        lambda heads: biases.CumulativeBias(
            -(2.0 ** -torch.arange(1, heads + 1)[:, None])
            * (torch.randn(1, heads, 16384) + 0.3).relu()
        ),
    ),
}


@pytest.mark.parametrize("name", FRACTIONS)
def test_as_little_is_computed_as_content_allows(name, monkeypatch):
    percent, percent_of_bound, heads, make = FRACTIONS[name]
    q, k = (torch.randn(1, heads, 16384, 64) for _ in range(2))
    bias = make(heads)
    plan = attention_plan(q, k, bias, tolerance=2**-9 / 9)
    assert 100 * plan.fraction.mean() <= 1.1 * percent
    assert (plan.bound > 0).any()
    assert (plan.bound <= plan.tolerance).all()

    monkeypatch.setattr("biased_flash_attn.skipping.plans._MIN_SUM", 1.0)  # nothing is trimmed
    plan = attention_plan(q, k, bias, tolerance=2**-9 / 9)
    assert 100 * plan.fraction.mean() <= percent_of_bound
