"""Skipped keys hold at most the tolerance's fraction of the softmax mass, by float64 sums."""

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
from biased_flash_attn.skipping import plans
from tests.support.biases import lines_through
from tests.support.cases import DTYPES
from tests.support.plans import kept_mask

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


def log_skipped_mass(call: Call, plan: Tensor) -> float:
    """The largest log of a query's skipped mass relative to its kept mass."""
    s, kept = call.logits(), kept_mask(plan, call.geometry)
    out, within = s.masked_fill(kept, -torch.inf), s.masked_fill(~kept, -torch.inf)
    ratio = out.logsumexp(-1) - within.logsumexp(-1)
    return torch.where(out.amax(-1) > -torch.inf, ratio, -torch.inf).max().item()


def kept_fraction(plan: Tensor, geometry: Geometry) -> float:
    """The fraction of the visible pairs that a plan keeps."""
    kept, seen = kept_mask(plan, geometry), geometry.visible()
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
    """A function that mostly decreases away from 0, with gains of both signs."""
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

# Adversarial contents: distant keys that outweigh the bias, a common mean, to which norms but not
# the softmax are sensitive, and queries of very different norms.
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
    # Most lengths are long enough for skipping.
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
def test_skipped_mass_is_at_most_the_tolerance(drawn):
    name, call, tolerance = drawn
    plan = call.plan(tolerance)
    if not (computed := kept_fraction(plan, call.geometry)) < 1:
        return
    event(f"{name}: keys are skipped")
    assert computed > 0
    assert log_skipped_mass(call, plan) <= math.log(tolerance)

    # The guarantee for outputs follows, here in float64.
    s, kept = call.logits(), kept_mask(plan, call.geometry)
    v = call.v.double().repeat_interleave(s.shape[1] // call.v.shape[1], 1)
    exact, without = s.softmax(-1), s.masked_fill(~kept, -torch.inf).softmax(-1)
    error = ((without - exact).nan_to_num() @ v).abs().amax(2)
    spread = v.amax(2) - v.amin(2)
    assert (error <= tolerance * spread + 1e-13 * v.abs().amax(2)).all()


@given(calls())
@settings(max_examples=40)
def test_key_ranges_advance_in_whole_tiles(drawn):
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
def test_decaying_biases_are_skipped(name, causal):
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
    assert kept_fraction(call.plan(1e-4), call.geometry) < (0.6 if causal else 0.4)
    assert kept_fraction(call.plan(1e-8), call.geometry) < (0.7 if causal else 0.5)


def test_a_common_mean_of_keys_does_not_affect_plans():
    call = drawn_call("linear")
    call.form = Linear(torch.tensor([[0.5, 0.125]]))
    before = kept_fraction(call.plan(1e-6), call.geometry)
    call.k += 10 * torch.randn(DIM)
    assert kept_fraction(call.plan(1e-6), call.geometry) == pytest.approx(before, abs=0.03)


def test_rising_biases_are_not_skipped():
    call = drawn_call("rising")
    assert kept_fraction(call.plan(1e-2), call.geometry) == 1


@pytest.mark.parametrize("sign", [1, -1])
def test_a_huge_key_is_kept_only_for_aligned_queries(sign):
    call = drawn_call("linear")
    call.form = Linear(torch.full((1, 2), 0.5))
    call.q[..., 0] = 1
    call.k[:, :, 200, 0] = sign * 10**5
    first, _ = call.plan(1e-6)
    assert (first <= 192).all() if sign == 1 else (first[..., -1] >= 768).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["k", "v", "q"])
def test_nonfinite_values_disable_skipping(where, value):
    call = drawn_call("linear")
    call.form = Linear(torch.full((1, 2), 0.5))
    assert (call.plan(1e-6)[0, :, :, -1] > 0).all()
    x = getattr(call, where)
    x[0, 1, -1 if where == "q" else 0, 0] = value
    first, _ = call.plan(1e-6)
    assert (first[0, 0, -1] > 0).all()
    assert (first[0, 1] == 0).all()


def test_a_huge_step_separates_documents():
    call = drawn_call("cumulative", heads=1)
    steps = torch.full((1, 1, 900), -0.01).double()
    steps[..., 500] = -1e4
    call.form = Cumulative(steps.cumsum(-1))
    plan = call.plan(1e-6)
    assert plan[0, 0, 0, 5] == 448  # the query 640, and the tile of the key 500
    assert log_skipped_mass(call, plan) <= math.log(1e-6)


def test_bounds_include_rounding_errors():
    """With equal keys far from 0, the bound is exact except for float32 rounding."""
    for _ in range(30):
        k = (2.0**17 * torch.randint(-3, 4, (DIM,))).expand(1, 1, 900, DIM)
        form = Linear(torch.tensor([[0.1]]))
        call = Call(torch.randn(1, 1, 1, DIM), k, k, form, Geometry(1, 900))
        keep_nearest = torch.tensor([768, 900]).int().reshape(2, 1, 1, 1)
        tolerance = math.exp(log_skipped_mass(call, keep_nearest)) * (1 - 1e-3)
        assert log_skipped_mass(call, call.plan(tolerance)) <= math.log(tolerance)


@pytest.mark.parametrize("sign", [1, -1])
def test_keys_beyond_returning_sums_are_kept(sign):
    call = drawn_call("log1p_square", heads=1, n=896, q=lambda q: q.mul_(0.1))
    steps = sign * torch.ones(1, 1, 896).double()
    steps[..., 448:] *= -1
    steps[..., [0, -1]] = 0  # the sums of the last query and the first key are equal
    call.form = Cumulative(steps.cumsum(-1), torch.full((1, 1, 896), 1e4), "log1p_square")
    s = call.logits()
    assert s[0, 0, -1, 0] > s[0, 0, -1, 500]
    assert (call.plan(1e-4)[0] == 0).all()
    # before the sums return
    call.geometry = Geometry(448, 448)
    call.q, call.k, call.v = (x[:, :, :448] for x in (call.q, call.k, call.v))
    call.form = Cumulative(call.form.sums[..., :448], call.form.gain[..., :448], "log1p_square")
    assert call.plan(1e-4)[0, 0, 0, -1] > 0
    assert log_skipped_mass(call, call.plan(1e-4)) <= math.log(1e-4)


def of_distance(formula):
    return lambda heads: biases.DistanceBias.from_function(formula, heads)


# The percentages of visible pairs that may be computed, as in the table of DESIGN.md, and that may
# remain without trimming, so that the bound has to contribute.
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
def test_computed_fractions_match_the_documentation(name, monkeypatch):
    percent, percent_of_bound, heads, make = FRACTIONS[name]
    q, k = (torch.randn(1, heads, 16384, 64) for _ in range(2))
    bias = make(heads)
    plan = attention_plan(q, k, bias, tolerance=2**-9 / 9)
    assert 100 * plan.fraction.mean() <= 1.1 * percent
    assert (plan.bound > 0).any()
    assert (plan.bound <= plan.tolerance).all()

    monkeypatch.setattr("biased_flash_attn.skipping.plans._MIN_SUM", 1.0)  # disables trimming
    plan = attention_plan(q, k, bias, tolerance=2**-9 / 9)
    assert 100 * plan.fraction.mean() <= percent_of_bound
