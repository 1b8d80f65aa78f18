"""NaN and infinities propagate as in the reference, and no further."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from biased_flash_attn import backends, biased_flash_attn, biases
from tests.support.biases import FORMS
from tests.support.cases import DTYPES, INSTRUCTION_SETS, Case, pairwise
from tests.support.numerics import assert_close_to_float64
from tests.support.problems import (
    Problem,
    check_problem,
    drawn,
    evaluate,
    fused,
    magnitudes,
    naive,
    outputs,
)

NAN, INF = torch.nan, torch.inf
# Positions out of 200: in the first tile of 64, at its end, in the middle, and in the last tile.
POSITIONS = [0, 63, 64, 100, 130, 199]


def poison(problem: Problem, where: str, n: int, value: float, channel: int | None = None) -> None:
    """Writes value at position n of q, k or v, into one channel or all of them."""
    with torch.no_grad():
        rows = getattr(problem, where)[0, 0, n]
        rows[slice(None) if channel is None else channel] = value


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("instruction_set", "where", "n", "value", "channel", "case"),
    [
        pytest.param(
            row.pop("instruction_set"),
            *(row.pop(name) for name in ("where", "n", "value", "channel")),
            Case(lengths=(200, 200), dims=(8, 8), heads=(2, 1), batch=1, **row),
        )
        for row in pairwise(
            bias=list(FORMS),
            dtype=DTYPES,
            where=["q", "k", "v"],
            n=POSITIONS,
            value=[NAN, INF, -INF],
            channel=[None, 0, 7],
            causal=[True, False],
            window=[None, 1, 70],
            instruction_set=INSTRUCTION_SETS,
        )
    ],
    ids=str,
)
def test_outputs_are_nonfinite_where_the_reference_is(
    instruction_set, where, n, value, channel, case
):
    problem = drawn(case)
    poison(problem, where, n, value, channel)
    with backends.instruction_set(instruction_set):
        check_problem(problem, evaluated=outputs)


@pytest.mark.parametrize(
    ("where", "n", "value", "case"),
    [
        pytest.param(
            *(row.pop(name) for name in ("where", "n", "value")),
            Case(lengths=(200, 200), dims=(8, 8), heads=(2, 1), batch=1, **row),
        )
        for row in pairwise(
            bias=list(FORMS),
            dtype=[torch.float64, torch.float32, torch.bfloat16],
            where=["q", "k", "v"],
            n=POSITIONS,
            value=[NAN, INF, -INF],
            causal=[True, False],
            window=[5, 70],
        )
    ],
    ids=str,
)
def test_nonfinite_values_affect_only_rows_that_see_them(where, n, value, case):
    """Queries that see the poisoned position have no valid gradients, nor do the keys they see; all
    others have the gradients of a problem with 0 there."""
    problem = drawn(case)
    poison(problem, where, n, 0.0)
    clean = problem.double()
    poison(problem, where, n, value)

    visible = case.geometry.visible()
    lost = torch.zeros(200, dtype=torch.bool)
    lost[n] = True
    lost_queries = lost if where == "q" else visible[:, n]
    lost_keys = visible[lost_queries].any(0)
    kept = {"q": ~lost_queries, "k": ~lost_keys, "v": ~lost_keys}

    ours, truth = evaluate(problem), evaluate(clean, naive)
    baseline, sums = evaluate(in_dtype(clean), naive), magnitudes(clean, case.dtype)
    for name, rows in kept.items():
        what = f"gradient of {name}"
        actual, exact, same, terms = (x[what][:, :, rows] for x in (ours, truth, baseline, sums))
        same = None if case.dtype == torch.float64 else same
        assert_close_to_float64(actual, exact, same, what, terms)


def in_dtype(problem: Problem) -> Problem:
    """A float64 problem, cast to the dtype of its case."""
    dtype = problem.case.dtype
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (problem.q, problem.k, problem.v))
    return dataclasses.replace(problem, q=q, k=k, v=v, grad_o=problem.grad_o.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_inputs_filled_with_nonfinite_values_return(where, value, dtype):
    problem = drawn(Case("distance", dtype, lengths=(130, 130), dims=(4, 4)))
    with torch.no_grad():
        for name in where:
            getattr(problem, name).fill_(value)
        ours, truth = fused(problem), naive(problem.double())
    for name, actual, exact in zip(("o", "lse"), ours, truth, strict=True):
        assert torch.equal(actual.isnan(), exact.isnan()), name
    evaluate(problem)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_outputs_at_the_end_of_the_range_are_kept(instruction_set, dtype):
    """Outputs are rounded once: values at the end of the dtype's range are kept."""
    problem = drawn(Case(dtype=dtype, lengths=(70, 70), batch=1))
    with torch.no_grad():
        problem.v.fill_(torch.finfo(dtype).max)
        with backends.instruction_set(instruction_set):
            o, _ = fused(problem)
    # Weights sum to 1 up to rounding, which may make the output overflow to infinity.
    assert not o.isnan().any()
    assert (o >= torch.finfo(dtype).max * (1 - 2 * torch.finfo(dtype).eps)).all()


MASKS_BY_BIAS = {
    "far": lambda d: d > 40,
    "near": lambda d: (d < 5) & (d > -5),
    "odd": lambda d: d % 2 == 1,
    "a-tile": lambda d: (d >= 30) & (d < 130),
    "past": lambda d: d >= 0,
    "future": lambda d: d < 0,
    "all": lambda d: d == d,
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", MASKS_BY_BIAS.values(), ids=MASKS_BY_BIAS)
def test_distances_of_minus_infinity_are_masked(hidden, dtype, causal):
    """Rows with no other distance give o = 0, lse = -inf and no gradient."""
    problem = drawn(Case("distance", dtype, lengths=(140, 140), dims=(8, 8), causal=causal))
    table = problem.bias
    with torch.no_grad():
        d = torch.arange(table.r.shape[1]) - table.origin
        table.r[:, hidden(d)] = -INF
    ours = check_problem(problem)
    seen = problem.case.geometry.visible() & ~hidden(problem.case.geometry.pair_distances())
    empty = ~seen.any(1)
    assert (ours["lse"].isinf() == empty).all()
    assert (ours["o"][:, :, empty] == 0).all()
    assert (ours["gradient of q"][:, :, empty] == 0).all()
    assert (ours["gradient of r"][:, hidden(d)] == 0).all()


def test_table_of_minus_infinity_equals_a_window():
    problem = drawn(Case(lengths=(200, 200)))
    qkv = problem.q, problem.k, problem.v
    hidden = biases.DistanceBias.from_function(lambda d: torch.where(d < 70, -d, -INF), 2)
    shown = biases.DistanceBias.from_function(lambda d: -d, 2)
    assert torch.equal(
        biased_flash_attn(*qkv, hidden, backend="cpu"),
        biased_flash_attn(*qkv, shown, window=70, backend="cpu"),
    )


@pytest.mark.parametrize("slope", [INF, -INF])
def test_infinite_slopes_match_the_reference(slope):
    problem = drawn(Case("linear", lengths=(70, 70)))
    with torch.no_grad():
        problem.bias.slopes[1] = slope
    check_problem(problem, evaluated=outputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("bias", "what"),
    [
        ("linear", "slopes"),
        ("linear-batch", "slopes"),
        ("distance", "r"),
        ("distance-shared", "r"),
        ("cumulative", "steps"),
        ("cumulative-gain", "gain"),
        ("log1p_square", "steps"),
        ("log1p_square-gain", "gain"),
    ],
)
@pytest.mark.parametrize("position", [0, 8])
def test_nan_in_a_bias_is_refused(bias, what, dtype, position):
    problem = drawn(Case(bias, dtype, lengths=(9, 9), heads=(9, 9), causal=False))
    own = getattr(problem.bias, what)
    entry = problem.bias.origin + position if what == "r" else position
    with torch.no_grad():
        own.view(-1, own.shape[-1])[-1, entry] = NAN
    with pytest.raises(ValueError, match=r"^bias: its .* contain NaN"):
        fused(problem)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
def test_infinity_in_a_table_is_refused(dtype, causal):
    """Such as that of -log(d) at distance 0."""
    problem = drawn(Case("distance", dtype, lengths=(9, 9), causal=causal))
    with torch.no_grad():
        problem.bias.r[-1, problem.bias.origin] = INF
    with pytest.raises(ValueError, match=r"^bias: its table values contain inf; .*, or -inf to"):
        fused(problem)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n", [0, 20, 64, 150])
def test_step_of_minus_infinity_matches_the_reference(n, causal, instruction_set):
    problem = drawn(Case("cumulative", lengths=(200, 200), dims=(8, 8), batch=1, causal=causal))
    with torch.no_grad():
        problem.bias.steps[..., n] = -INF
    with backends.instruction_set(instruction_set):
        check_problem(problem, evaluated=outputs)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accumulators_of_large_values_do_not_overflow(dtype, instruction_set):
    q = torch.ones(1, 1, 200, 4, dtype=dtype)
    k, v = torch.zeros_like(q), torch.full_like(q, 1e30)
    k[:, :, 0] = 1.25  # an earlier key outweighs the later ones, which set the pivot, by 2^7
    v[:, :, 0] = 3e36
    with backends.instruction_set(instruction_set):
        o = biased_flash_attn(q, k, v, scale=1.0, backend="cpu")
    exact = biased_flash_attn(*(x.double() for x in (q, k, v)), scale=1.0, backend="reference")
    torch.testing.assert_close(o.double(), exact, rtol=2e-2, atol=0)
