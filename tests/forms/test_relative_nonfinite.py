"""NaN and infinities that no visible pair of a relative bias has affect no result."""

from __future__ import annotations

import functools

import pytest
import torch

from biased_flash_attn import biased_flash_attn, biases
from tests.sequences.packed_cases import PaddedCase, drawn_padded, padded
from tests.support.cases import Case, pairwise
from tests.support.numerics import assert_close_to_float64
from tests.support.problems import Problem, drawn, evaluate, fused, magnitudes, naive

# With keys that no query sees, and queries that see no key, in the same tile as others. The
# tables end before the farthest visible key, or beyond it.
MASKS = {
    "window": {"lengths": (40, 130), "window": 20},
    "window-both": {"lengths": (40, 130), "window": 20, "causal": False},
    "fewer-keys": {"lengths": (130, 50)},
    "fewer-keys-window": {"lengths": (130, 50), "window": 9},
}


def plant(problem: Problem, where: str, value: float) -> None:
    """Writes value to all factors or columns of tables that no visible pair has."""
    case, bias = problem.case, problem.called_bias()
    visible, n = case.geometry.visible(), bias.query_tables.shape[-1]
    column = (case.geometry.pair_distances() - bias.first)[visible]
    if bias.beyond == "last":
        column = column.clamp(0, n - 1)
    rows = {"query_factors": ~visible.any(1), "key_factors": ~visible.any(0)}
    with torch.no_grad():
        if where in rows:
            getattr(problem.bias, where)[:, :, rows[where]] = value
        else:
            getattr(problem.bias, where)[..., ~torch.isin(torch.arange(n), column)] = value


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("where", "value", "case"),
    [
        pytest.param(row.pop("where"), row.pop("value"), Case(**MASKS[row.pop("mask")], **row))
        for row in pairwise(
            bias=[
                "relative",
                "relative_last-both64",
                "relative-same-dtype3",
                "relative_last-same-dtype64",
            ],
            dtype=[torch.float32, torch.bfloat16],
            mask=list(MASKS),
            where=["query_factors", "key_factors", "query_tables", "key_tables"],
            value=[torch.nan, torch.inf, -torch.inf],
        )
    ],
    ids=str,
)
def test_nonfinite_factors_and_tables_without_visible_pairs_do_not_affect_results(
    where, value, case, backend
):
    problem = drawn(case)
    plant(problem, where, 0.0)
    exact = problem.double()
    truth, baseline = evaluate(exact, naive), evaluate(problem, naive)
    sums = magnitudes(exact, case.dtype)
    plant(problem, where, value)
    for name, x in evaluate(problem, functools.partial(fused, backend=backend)).items():
        assert_close_to_float64(x, truth[name], baseline[name], name, sums[name])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["disentangled", "shaw"])
def test_queries_and_keys_without_visible_pairs_do_not_affect_trained_vectors(
    name, mask, value, backend
):
    """Where the factors are q and k themselves."""
    case = Case(**MASKS[mask], batch=1)
    made = {
        "disentangled": lambda: biases.Disentangled(32, *case.heads[:1], 16, max_distance=5),
        "shaw": lambda: biases.Shaw(case.heads[0], 16, left=5),
    }
    problem, bias, visible = drawn(case), made[name](), case.geometry.visible()
    leaves = {"q": problem.q, "k": problem.k, "v": problem.v, **dict(bias.named_parameters())}
    hidden = {"q": ~visible.any(1), "k": ~visible.any(0), "v": ~visible.any(0)}
    results = []
    for planted in (0.0, value):
        with torch.no_grad():
            for side, rows in hidden.items():
                leaves[side][:, :, rows] = planted
        q, k, v = (leaves[x] for x in "qkv")
        o, lse = biased_flash_attn(
            q,
            k,
            v,
            bias(q=q, k=k),
            causal=case.causal,
            window=case.window,
            scale=bias.scale,
            return_lse=True,
            backend=backend,
        )
        cotangents = problem.grad_o, problem.grad_lse
        grads = torch.autograd.grad((o, lse), leaves.values(), cotangents)
        results.append({"o": o, "lse": lse, **dict(zip(leaves, grads, strict=True))})
    for what, exact in results[0].items():
        torch.testing.assert_close(results[1][what], exact, rtol=1e-5, atol=1e-5, msg=what)


@pytest.mark.parametrize("bias", ["relative", "relative_last-same-dtype3"])
def test_factors_of_padding_do_not_affect_results(bias, backend):
    case = PaddedCase(bias, torch.float16, lengths=(50, 50), padding=((7, 3), (0, 20)))
    problem = drawn_padded(case)
    attend = functools.partial(padded, backend=backend)
    exact = evaluate(problem, attend)
    with torch.no_grad():
        for x in (problem.bias.query_factors, problem.bias.key_factors):
            rows = x.transpose(1, 2)
            rows[~case.mask] = torch.nan
    for name, x in evaluate(problem, attend).items():
        assert torch.equal(x, exact[name]), name
