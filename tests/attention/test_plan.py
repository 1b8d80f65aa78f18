"""Descriptions of calls: plans, and the receptive fields of biases."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from biased_flash_attn import AttentionPlan, attention_plan, biases
from biased_flash_attn.forms import Geometry
from biased_flash_attn.shared_constants import PLAN_QUERIES
from tests.support.plans import kept_mask


def two_heads(n_query: int = 1300, n_key: int = 1300, **options) -> AttentionPlan:
    """A head that decays fast and one that does not."""
    bias = biases.DistanceBias.from_function(
        lambda d: -torch.tensor([[0.5], [1e-4]]).double() * d, num_heads=2
    )
    q, k = torch.randn(2, 2, n_query, 16), torch.randn(2, 2, n_key, 16)
    return attention_plan(q, k, bias, **options)


@pytest.mark.parametrize(
    ("n_query", "n_key", "causal", "window"),
    [
        (1300, 1300, True, None),
        (1300, 1300, False, None),
        (700, 1300, True, 1000),
        (1, 1300, True, 9),
    ],
)
def test_fraction_and_window_follow_from_the_ranges(n_query, n_key, causal, window):
    plan = two_heads(n_query, n_key, causal=causal, window=window)
    geometry = Geometry(n_query, n_key, causal, window)
    seen = geometry.visible().expand(2, 2, -1, -1)
    kept = seen & kept_mask(torch.stack([plan.first_key, plan.end_key]), geometry)

    d = geometry.pair_distances().abs() + 1
    assert torch.equal(plan.window, torch.where(kept, d, 0).amax((2, 3)))

    def tiles(pairs):
        shape = (-n_key % 64, -n_query % PLAN_QUERIES)
        padded = torch.nn.functional.pad(pairs, (0, shape[0], 0, shape[1]))
        return (
            padded.unflatten(3, (-1, 64)).unflatten(2, (-1, PLAN_QUERIES)).any(5).any(3).sum((2, 3))
        )

    torch.testing.assert_close(plan.fraction, tiles(kept).double() / tiles(seen))
    assert (plan.fraction[:, 1] == 1).all()
    assert (plan.bound[:, 1] == 0).all()
    if window is None:
        assert (plan.fraction[:, 0] < 0.5).all()
        assert ((plan.bound[:, 0] > 0) & (plan.bound[:, 0] <= plan.tolerance)).all()


def test_content_bounds_the_products_with_keys():
    q, k = torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 4, 3)
    q[0, 0, 1, 0], k[0, 0, 3, 1] = 2, 4  # the mean of the keys is 1 there, at distances 3 and 1
    assert attention_plan(q, k, scale=-0.5).content.item() == pytest.approx(0.5 * 2 * 3)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tolerance": 0.0}, "tolerance"),
        ({"backend": "reference"}, "a backend that computes everything"),
        ({"n_query": 900, "n_key": 900}, "too few keys for a plan"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_plans_match_computed_tiles(change, why):
    plan = two_heads(**change)
    assert (plan.fraction == 1).all(), why
    assert (plan.bound == 0).all(), why


def test_descriptions_have_a_line_per_head():
    plan = two_heads()
    lines = str(plan).splitlines()
    assert "1300 queries, 1300 keys, tolerance 5.96e-08" in lines[0]
    assert len(lines) == 2 + 2
    assert lines[-1].split()[:3] == ["1", "100.0%", "1300"]
    assert lines[-2].split()[-1] == f"{math.ceil(24 * math.log(2) / 0.5)}"


def test_a_bias_of_hidden_states_has_no_receptive_field():
    q = torch.randn(1, 2, 1100, 8)
    plan = attention_plan(q, q, biases.CumulativeBias(-torch.rand(1, 2, 1100)))
    assert plan.receptive_field is None
    assert str(plan).splitlines()[-1].endswith("-")


def test_plans_can_be_drawn(tmp_path):
    for causal in (True, False):
        two_heads(causal=causal).draw().savefig(tmp_path / "plan.png")
        assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_drawing_without_matplotlib_names_the_remedy():
    script = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import torch; from biased_flash_attn import attention_plan\n"
        "attention_plan(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2)).draw()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True)
    assert done.returncode == 1
    assert b"pip install 'biased-flash-attn[plot]'" in done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.randn(1, 2, 5)}, r"q has shape \(1, 2, 5\)"),
        ({"bias": biases.ALiBi(3)}, "bias is for 3 heads"),
        ({"tolerance": 1.5}, r"tolerance is 1.5; it must be None or a number in \[0, 1\)"),
        ({"window": 0}, "window is 0"),
        ({"backend": "tpu"}, "backend is 'tpu'"),
    ],
)
def test_refusals_are_those_of_the_call(change, message):
    arguments = {"q": torch.randn(1, 2, 5, 4), "k": torch.randn(1, 2, 5, 4), **change}
    with pytest.raises(ValueError, match="^" + message):
        attention_plan(**arguments)


# name: bias, and its receptive fields at 2^-9 and 2^-24
FIELDS = {
    "alibi": (biases.ALiBi(1, exponent=4), 100, 267),
    "type1": (biases.Type1(1), 311, 2**24 * 6 / math.pi**2),
    "type2": (biases.Type2(1), 13, 70),
    "kerple": (
        biases.DistanceBias.from_function(lambda d: -3 * torch.log1p(d), 1),
        15,
        2642,
    ),
    "power": (biases.DistanceBias.from_function(lambda d: -(d**0.5), 1), 68, 376),
}


@pytest.mark.parametrize("name", FIELDS)
def test_receptive_field_of_a_convergent_series(name):
    bias, wide, narrow = FIELDS[name]
    assert bias.receptive_field(2**-9).item() == wide
    assert bias.receptive_field(2**-24).item() == pytest.approx(
        narrow, rel=0.03 if narrow > 2**14 else 0
    )


@pytest.mark.parametrize(
    "bias",
    [
        biases.InverseDistance(2),
        biases.InverseLogDistance(2),
        biases.Sandwich(2),
        biases.T5(2),
        biases.ClippedTable(2),
        biases.ALiBi(2, trainable=True),
    ],
    ids=lambda bias: type(bias).__name__,
)
def test_receptive_field_of_a_divergent_series_is_infinite(bias):
    if isinstance(bias, biases.ALiBi):
        bias.slopes.data[:] = torch.tensor([0.0, -0.1])
    assert (bias.receptive_field(0.1) == torch.inf).all()
    assert bias.receptive_field(0.1).shape == (2,)


def test_receptive_field_is_that_of_each_head():
    bias = biases.KerpleLog(3)
    bias.r1.data, bias.r2.data = torch.tensor([0.9, 1.1, 4.0]), torch.ones(3)
    field = bias.receptive_field(2**-9)
    assert field[0] == torch.inf
    assert field[1].isfinite()
    d = torch.arange(10**5).double()
    sums = (-4 * torch.log1p(d)).exp()
    beyond = sums.flip(0).cumsum(0).flip(0)
    assert field[2] == (beyond < 2**-9 * beyond[0]).nonzero()[0].item()


@pytest.mark.parametrize(("eps", "error"), [(0, ValueError), (1.0, ValueError), ("1", TypeError)])
def test_receptive_field_refuses_invalid_eps(eps, error):
    with pytest.raises(error, match=r"^eps is .*; it must be a number in \(0, 1\)"):
        biases.Type2(1).receptive_field(eps)


def test_meta_tensors_are_refused():
    q = torch.empty(1, 2, 2048, 16, device="meta")
    with pytest.raises(ValueError, match=r"^q is on meta and has no values"):
        attention_plan(q, q)
