"""Long sequences, which reveal biases that are not evaluated relative to the tile or precisely."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from biased_flash_attn import biased_flash_attn, biases
from biased_flash_attn.forms import Cumulative, Geometry
from tests.support.cases import Case
from tests.support.numerics import assert_close_to_float64
from tests.support.problems import Problem, drawn, evaluate, fused, magnitudes, naive, of_tile

N = 8192
ROWS = [63, 64, 1000, 4095, 4096, 5555, 8100, N - 1]


def small_last_steps() -> biases.CumulativeBias:
    """Sums reach -3000 before the last 2000 keys, among which the bias is small."""
    steps = -torch.rand(1, 2, N)
    steps[..., 6000:] *= 1e-3
    return biases.CumulativeBias(steps)


LONG = {
    "none": lambda: None,
    "alibi-steep": lambda: biases.ALiBi(2, exponent=0.25),
    "alibi-flat": lambda: biases.ALiBi(2, exponent=8),
    "kerple_log": lambda: biases.KerpleLog(2),
    "sandwich": lambda: biases.Sandwich(2),
    # -0.69 on average, -5700 in sum
    "steps": lambda: biases.CumulativeBias(-1.38 * torch.rand(1, 2, N)),
    "steps-weak": small_last_steps,
    "gain": lambda: biases.CumulativeBias(-torch.rand(1, 2, N), 0.1 + torch.rand(1, 2, N)),
    "kernel": lambda: biases.CumulativeBias(-torch.rand(1, 2, N), kernel="log1p_square"),
}


class DenseRow(nn.Module):
    """The dense bias of one query."""

    def __init__(self, bias, i: int):
        super().__init__()
        if isinstance(bias, biases.CumulativeBias):
            gain = None if bias.gain is None else bias.gain[..., i : i + 1]
            bias = biases.CumulativeBias(bias.steps[..., : i + 1], gain, bias.kernel)
        self.row = bias.dense(1, i + 1).detach()

    def dense(self, n_query: int, n_key: int) -> Tensor:
        return self.row


def row_of(case: Case, q, k, v, bias, i: int) -> Problem:
    """Query i over the keys that it sees."""
    case = dataclasses.replace(case, lengths=(1, i + 1))
    q, k, v = q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1]
    dense = None if bias is None else DenseRow(bias, i)
    return Problem(case, q, k, v, dense, torch.zeros(q.shape), torch.zeros(q.shape[:3]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", LONG)
@torch.no_grad()
def test_rows_of_long_sequences_are_as_exact_as_short_ones(bias, dtype):
    case = Case(dtype=dtype, lengths=(N, N), batch=1)
    q, k, v = (torch.randn(1, 2, N, 16).to(dtype) for _ in "qkv")
    bias = LONG[bias]()
    # The default tolerance is below the resolution of float32.
    options = {"tolerance": 0.0 if dtype == torch.float64 else None, "backend": "cpu"}
    outputs = biased_flash_attn(q, k, v, bias, return_lse=True, **options)
    rows = [row_of(case, q, k, v, bias, i) for i in ROWS]
    truth, baseline = [naive(row.double()) for row in rows], [naive(row) for row in rows]
    of_tiles = torch.as_tensor(of_tile(bias, N)).expand(1, 2, N, 1)
    sums = [
        magnitudes(row.double(), dtype, of_tiles[:, :, i : i + 1])
        for row, i in zip(rows, ROWS, strict=True)
    ]
    for place, name in enumerate(("o", "lse")):
        exact, same = (torch.cat([row[place] for row in all_], 2) for all_ in (truth, baseline))
        same = None if dtype == torch.float64 else same
        terms = torch.cat([row[name] for row in sums], 2)
        assert_close_to_float64(outputs[place][:, :, ROWS], exact, same, name, terms)


class Sums(nn.Module):
    """A cumulative bias given by its prefix sums."""

    def __init__(self, sums: Tensor):
        super().__init__()
        self.sums = nn.Parameter(sums)

    def lower(self, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> Cumulative:
        return Cumulative(self.sums.double())

    def dense(self, n_query: int, n_key: int) -> Tensor:
        return Cumulative(self.sums.double()).dense(Geometry(n_query, n_key, causal=False))


def with_columns(case: Case, bias: nn.Module) -> Problem:
    """A problem in which the gradient of k's last channel is the sum of a column of dS."""
    problem = dataclasses.replace(drawn(case), bias=bias.to(lse_dtype(case)))
    with torch.no_grad():
        problem.q[..., -1] = 1 / problem.scale
    return problem


def lse_dtype(case: Case) -> torch.dtype:
    return torch.promote_types(case.dtype, torch.float32)


BOTH_EXACT = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


@BOTH_EXACT
def test_rows_of_ds_sum_to_the_gradient_of_lse(dtype):
    """The gradient of a prefix sum C_t is row t of dS minus its column t."""
    case = Case(dtype=dtype, lengths=(2000, 2000), dims=(17, 16), heads=(1, 1), batch=1)
    problem = with_columns(case, Sums(torch.randn(1, 1, 2000)))

    def rows(attend) -> Tensor:
        results = evaluate(problem, attend)
        return results["gradient of sums"] + results["gradient of k"][..., -1]

    columns = magnitudes(problem.double(), dtype)["gradient of k"][..., -1]
    same = None if dtype == torch.float64 else rows(naive)
    exact = problem.grad_lse.double()
    assert_close_to_float64(rows(fused), exact, same, "rows of dS", 2 * columns)


@BOTH_EXACT
def test_slope_gradients_match_sums_of_rows_and_columns(dtype):
    """sum_ij dS_ij (p_i - j) = sum_i p_i dlse_i - sum_j j (column j of dS)."""
    case = Case(dtype=dtype, lengths=(1500, 2000), dims=(17, 16), batch=1)
    problem = with_columns(case, biases.ALiBi(2, trainable=True))
    positions, keys = problem.case.geometry.positions(), torch.arange(2000)

    results = evaluate(problem)
    rows = (positions * problem.grad_lse.double()).sum(-1)
    columns = (keys * results["gradient of k"][..., -1].double()).sum(-1)
    terms = (keys * magnitudes(problem.double(), dtype)["gradient of k"][..., -1]).sum(-1)
    actual, exact = -results["gradient of slopes"], (rows - columns)[0]
    assert_close_to_float64(actual, exact, None, "gradient of slopes", terms[0])


def test_table_gradients_sum_to_those_of_lse():
    problem = drawn(Case("distance", torch.float64, lengths=(300, 2000), batch=1))
    actual, exact = evaluate(problem)["gradient of r"].sum(1), problem.grad_lse.sum((0, 2))
    terms = magnitudes(problem, torch.float64)["gradient of r"].sum(1)
    assert_close_to_float64(actual, exact, None, "sum of dS", terms)


@pytest.mark.parametrize("with_gain", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_early_step_gradients_are_free_of_later_rounding(causal, with_gain, seed):
    """Weights decay so fast that the last queries depend only on the last steps.

    The gradient of an earlier step sums those of all these pairs twice, with opposite signs.
    """
    n, last = 300, 100
    q, k, v = (torch.randn(1, 2, n, 16) for _ in range(3))
    steps = (-2 - torch.rand(1, 2, n)).requires_grad_()
    gain = torch.rand(1, 2, n) + 1 if with_gain else None
    bias = biases.CumulativeBias(steps, gain)
    o = biased_flash_attn(q, k, v, bias, causal=causal, tolerance=0.0, backend="cpu")
    o[:, :, -last:].backward(torch.randn(1, 2, last, 16))
    assert steps.grad[:, :, -last:].abs().max() > 1e-3
    # Only the rounding of the float64 sums remains.
    assert steps.grad[:, :, : n - 2 * last].abs().max() < 1e-15 * n


@pytest.mark.parametrize("side", ["query", "key"])
def test_gradients_of_the_last_vector_do_not_lose_precision_with_length(side):
    """With equal logits, lse has the gradient 1 / (i + 1) for each of the i + 1 keys of query i."""
    n, columns = N, 41
    q, table = torch.zeros(1, 1, n, 1), torch.zeros(1, 1, columns, requires_grad=True)
    given = {f"{side}_factors": torch.ones(1, 1, n, 1), f"{side}_tables": table}
    bias = biases.RelativeBias(**given, beyond="last")
    _, lse = biased_flash_attn(q, q, q, bias, tolerance=0.0, return_lse=True, backend="cpu")
    (gradient,) = torch.autograd.grad(lse.sum(), table)
    i = torch.arange(n, dtype=torch.float64)
    exact = ((i - columns + 2).clamp(min=0) / (i + 1)).sum()
    assert (gradient[0, 0, -1] / exact - 1).abs() <= 2**-22
