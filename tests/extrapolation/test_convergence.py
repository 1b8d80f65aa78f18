"""Series and receptive fields of biases, and their order."""

from __future__ import annotations

import math

import pytest
import torch

from biased_flash_attn import biases
from biased_flash_attn.extrapolation import (
    compare_receptive_fields,
    convergence,
    log_fit,
    normalized_receptive_field,
)

LN = torch.log


def kerple(r1: float, r2: float = 1.0) -> biases.KerpleLog:
    bias = biases.KerpleLog(1)
    bias.r1.data[:], bias.r2.data[:] = r1, r2
    return bias


def of(formula) -> biases.DistanceBias:
    return biases.DistanceBias.from_function(formula, 1)


CONVERGENT = {
    "alibi": biases.ALiBi(3),
    "kerple 1.001": kerple(1.001),
    "kerple 1.001, slow": kerple(1.001, 0.01),
    "kerple 2": kerple(2),
    "type1": biases.Type1(3),
    "type2": biases.Type2(3),
    "type1, scaled": biases.Type1(3, slopes="alibi"),
    "type2, scaled": biases.Type2(3, slopes="geometric"),
    "window": of(lambda d: torch.where(d < 5, 0, -torch.inf)),
    "square": of(lambda d: -(d**2)),
    "1 / (n ln^1.01 n)": of(lambda d: -LN(d + 9) - 1.01 * LN(LN(d + 9))),
    "1 / (n ln n (ln ln n)^2)": of(lambda d: -LN(d + 20) - LN(LN(d + 20)) - 2 * LN(LN(LN(d + 20)))),
    "1 / (n exp(sqrt(ln n)))": of(lambda d: -LN(d + 9) - LN(d + 9).sqrt()),
}
DIVERGENT = {
    "1/n": biases.InverseDistance(3),
    "1 / (n ln n)": biases.InverseLogDistance(3),
    "1/n, scaled": biases.InverseDistance(3, slopes="alibi"),
    "kerple 1": kerple(1),
    "kerple 0.999": kerple(0.999),
    "kerple 0.01": kerple(0.01, 0.01),
    "sandwich": biases.Sandwich(3),
    "sandwich of many heads": biases.Sandwich(16),
    "t5": biases.T5(3),
    "clipped_table": biases.ClippedTable(3),
    "1 / (n ln^0.99 n)": of(lambda d: -LN(d + 9) - 0.99 * LN(LN(d + 9))),
    "1 / (n ln n ln ln n)": of(lambda d: -LN(d + 20) - LN(LN(d + 20)) - LN(LN(LN(d + 20)))),
    "exp(sqrt(ln n)) / n": of(lambda d: -LN(d + 9) + LN(d + 9).sqrt()),
    "growing": of(lambda d: 0.1 * d),
}


@pytest.mark.parametrize("name", [*CONVERGENT, *DIVERGENT])
def test_numeric_verdicts(name):
    bias = CONVERGENT.get(name) or DIVERGENT[name]
    verdict = convergence(bias)
    assert verdict.numeric.tolist() == [name in CONVERGENT] * bias.num_heads
    assert torch.equal(verdict.converges, verdict.numeric)


def test_closed_forms_decide_scaled_distances():
    """The logarithm of a slope is not yet negligible where the exponents are fitted."""
    found = convergence(biases.InverseLogDistance(3, slopes=[0.1, 2.0, 0.0]))
    assert found.converges.tolist() == [False] * 3
    assert convergence(biases.Type1(2, slopes=[0.1, 0.0])).converges.tolist() == [True, False]
    assert convergence(biases.Type2(2, slopes=[0.1, 0.0])).converges.tolist() == [True, False]


def test_the_exponent_of_type1_with_slopes_is_2():
    """The square of the distance is too large for a float."""
    exponents = convergence(biases.Type1(2, slopes=[0.1, 2.0])).exponents
    assert exponents[:, 0].tolist() == pytest.approx([2, 2], abs=1e-8)


def test_exponents_of_known_series():
    for p, q, r in ((1, 0, 0), (1, 1, 1), (1, -3, 2.5), (1.02, 0.5, 0)):
        bias = of(
            lambda d, e=(p, q, r): (
                -(e[0] * LN(d + 20) + e[1] * LN(LN(d + 20))) - e[2] * LN(LN(LN(d + 20)))
            )
        )
        assert convergence(bias).exponents[0].tolist() == pytest.approx([p, q, r], abs=1e-8)


@pytest.mark.parametrize("name", biases.DISTANCE_BIASES)
def test_closed_forms_agree_with_numeric_verdicts(name):
    verdict = convergence(biases.DISTANCE_BIASES[name](8))
    assert verdict.closed_form
    assert torch.equal(verdict.known, verdict.numeric)
    assert verdict.closed_form in str(verdict)
    assert str(verdict).count("  converges  ") == verdict.converges.sum()


def test_closed_forms_take_precedence():
    bias = biases.KerplePower(1)
    bias.r1.data[:] = bias.r2.data[:] = 0.01
    verdict = convergence(bias)
    assert not verdict.numeric
    assert verdict.converges


def test_smoothed_sandwich_converges_in_the_heads_with_steep_curves():
    verdict = convergence(biases.SmoothedSandwich(8))
    assert verdict.converges.tolist() == [h < 6.6 for h in range(1, 9)]


def test_sandwich_never_falls_below_its_floor():
    bias = biases.Sandwich(4)
    d = torch.logspace(0, 15, 4000, dtype=torch.float64).round()
    floor = -bias.dbar / torch.tensor([2.0, 4.0, 6.0, 8.0])
    assert (bias.curve(d).detach() >= floor[:, None]).all()


def test_sums_equal_those_of_the_first_terms():
    sums = convergence(biases.Type1(2)).sums[1]
    for k in (0, 1, 5, 16):
        assert sums[k].item() == pytest.approx(math.fsum(n**-2 for n in range(1, 2**k + 1)))


@pytest.mark.parametrize("eps", [0.5, 0.1, 1e-2, 1e-4])
def test_receptive_field_of_alibi_is_its_closed_form(eps):
    """B (1 - exp(-m j)) > B (1 - eps) where j > -ln(eps) / m (appendix C)."""
    bias = biases.ALiBi(5, shift=torch.rand(()).item())
    slopes = -bias.curve(torch.ones(1).double())[:, 0]
    assert bias.receptive_field(eps).tolist() == [
        math.floor(-math.log(eps) / m) + 1 for m in slopes.tolist()
    ]


@pytest.mark.parametrize("eps", [0.3, 0.05, 1e-3])
def test_receptive_field_of_type1_follows_the_tail_of_its_series(eps):
    """The tail beyond j terms is between 1/(j + 1) and 1/j: 1 - 1/j is the paper's integral."""
    tail = eps * math.pi**2 / 6
    field = biases.Type1(1).receptive_field(eps).item()
    assert 1 / (field + 1) < tail <= 1 / (field - 1)


def test_type2_has_a_smaller_field_than_type1():
    order = compare_receptive_fields(biases.Type2(2), biases.Type1(2))
    assert order.smaller.tolist() == [-1, -1]
    assert compare_receptive_fields(biases.Type1(2), biases.Type2(2)).smaller.tolist() == [1, 1]
    for eps in (order.eps[0].item() * 0.99, 1e-3, 1e-5):
        assert biases.Type2(1).receptive_field(eps) <= biases.Type1(1).receptive_field(eps)


def test_order_of_fields_follows_the_order_of_fractions():
    first, second = biases.ALiBi(8), biases.Type1(8)
    order = compare_receptive_fields(first, second)
    assert order.smaller.tolist() == [-1] * 8
    d = torch.arange(2**13).double()
    fractions = []
    for bias in (first, second):
        terms = bias.curve(d).exp()
        total = terms.sum(1, keepdim=True) if bias is first else math.pi**2 / 6
        fractions.append((terms / total).expand(8, -1))
    for h, since in enumerate(order.distance.long().tolist()):
        assert (fractions[0][h, since:] <= fractions[1][h, since:]).all()
        assert fractions[0][h, since - 1] > fractions[1][h, since - 1]


def test_infinite_fields_are_larger_than_finite_ones():
    finite, infinite = biases.Type1(1), biases.InverseDistance(1)
    assert compare_receptive_fields(finite, infinite).smaller.tolist() == [-1]
    assert compare_receptive_fields(infinite, finite).smaller.tolist() == [1]
    assert compare_receptive_fields(infinite, biases.Sandwich(1)).smaller.tolist() == [0]
    assert compare_receptive_fields(finite, biases.Type1(1)).smaller.tolist() == [0]


def published_curve(array: torch.Tensor, n: int) -> tuple[list[float], list[float]]:
    """The loop of appendix E, over indices."""
    epsilon = torch.linspace(0, 1, n, dtype=torch.float64).flip(0).tolist()
    index, total, m, s, i = [0] * n, array.cumsum(0)[-1].item(), len(array), 0.0, 0
    for j in range(m):
        while i < n and s >= total * (1 - epsilon[i]):
            index[i] = j
            i += 1
        s = array[: j + 1].cumsum(0)[-1].item()
    while i < n:
        index[i] = m
        i += 1
    return [j / m for j in index], epsilon


def test_normalized_curve_follows_the_paper():
    length, points = int(torch.randint(20, 200, ())), int(torch.randint(3, 60, ()))
    weights = biases.ALiBi(4).curve(torch.arange(length).double()).exp()
    fields, eps = normalized_receptive_field(weights, points)
    for head, field in zip(weights, fields, strict=True):
        exact, epsilon = published_curve(head, points)
        assert field.tolist() == exact
    assert eps.tolist() == pytest.approx(epsilon)


def test_fit_of_sandwich_equals_the_published_curve():
    """-0.825 log(1 + d) - 0.8 fits the 8192 distances of figure 9, and not the nearest 50."""
    published = biases.Sandwich(8, first_frequency=0)  # h = 8 in the last head
    slope, intercept = (x[-1].item() for x in log_fit(published, 8192))
    assert slope == pytest.approx(-0.825, abs=0.01)
    assert intercept == pytest.approx(-0.8, abs=0.01)
    slope, intercept = (x[-1].item() for x in log_fit(published, 50))
    assert slope == pytest.approx(-1.024, abs=1e-3)
    assert intercept == pytest.approx(-0.015, abs=1e-3)


def test_fit_of_a_logarithm_is_exact():
    slope, intercept = log_fit(biases.SmoothedSandwich(8), 50)
    assert slope.tolist() == pytest.approx([-0.825 * 8 / h for h in range(1, 9)])
    assert intercept.tolist() == pytest.approx([-0.8 * 8 / h for h in range(1, 9)])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: convergence(biases.Cable(8, 2)),
            TypeError,
            "bias is a Cable; it must be a function of the distance",
        ),
        (lambda: convergence(biases.FIRE(2)), TypeError, "bias is a FIRE; it must be a function"),
        (
            lambda: convergence(biases.Shaw(2, 8)),
            TypeError,
            "bias is a Shaw; it must be a function",
        ),
        (
            lambda: convergence(biases.Shaw(2, 8)(q=torch.ones(1, 2, 3, 8))),
            TypeError,
            "bias is a RelativeBias; it must be a function of the distance",
        ),
        (
            lambda: compare_receptive_fields(biases.Type1(2), biases.Type2(3)),
            ValueError,
            "second has 3 heads; it must have those of first, 2",
        ),
        (
            lambda: compare_receptive_fields(biases.Type1(2), "type2"),
            TypeError,
            "second is a str; it must be a function of the distance",
        ),
        (lambda: log_fit(biases.Type1(2), 1), ValueError, "points is 1; it must be an int from 2"),
    ],
)
def test_invalid_arguments_are_refused(call, error, message):
    with pytest.raises(error, match="^" + message):
        call()
