"""Long sequences, where a bias evaluated far from the tile, or in too few digits, shows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from biased_flash_attn import biased_flash_attn, biases, reference
from biased_flash_attn.forms import Geometry
from cases import Case, drawn, evaluate, fused, naive
from numerics import assert_close_to_float64

N = 8192
ROWS = [63, 64, 1000, 4095, 4096, 5555, 8100, N - 1]


def steep_steps() -> biases.CumulativeBias:
    """Steps of -0.69 on average, which add up to -5700; then some of no size."""
    return biases.CumulativeBias(-2 * 0.69 * torch.rand(1, 2, N))


def weak_then_steep() -> biases.CumulativeBias:
    """A sum of 5700 is reached before the last 2000 keys, between which the bias is small."""
    steps = -torch.rand(1, 2, N)
    steps[..., 6000:] *= 1e-3
    return biases.CumulativeBias(steps)


LONG = {
    "none": lambda: None,
    "alibi-steep": lambda: biases.ALiBi(2, exponent=0.25),
    "alibi-flat": lambda: biases.ALiBi(2, exponent=8),
    "kerple_log": lambda: biases.KerpleLog(2),
    "sandwich": lambda: biases.Sandwich(2),
    "steps": steep_steps,
    "steps-weak": weak_then_steep,
    "gain": lambda: biases.CumulativeBias(-torch.rand(1, 2, N), 0.1 + torch.rand(1, 2, N)),
    "kernel": lambda: biases.CumulativeBias(-torch.rand(1, 2, N), kernel="log1p_square"),
}


def one_row(q, k, v, bias, i: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Query i by the reference, over the keys that it sees."""
    n = i + 1
    if isinstance(bias, biases.CumulativeBias):
        gain = None if bias.gain is None else bias.gain[..., i:n]
        bias = biases.CumulativeBias(bias.steps[..., :n], gain, bias.kernel)
    dense = None if bias is None else bias.dense(1, n)
    q, k, v = (x.to(dtype) for x in (q[:, :, i:n], k[:, :, :n], v[:, :, :n]))
    return reference.attention(q, k, v, dense, Geometry(1, n), q.shape[3] ** -0.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", LONG)
def test_rows_of_long_sequences_are_as_exact_as_short_ones(bias, dtype):
    q, k, v = (torch.randn(1, 2, N, 16).to(dtype) for _ in "qkv")
    bias = LONG[bias]()
    with torch.no_grad():
        outputs = biased_flash_attn(q, k, v, bias, return_lse=True, backend="cpu")
        exact, same = (
            [one_row(q, k, v, bias, i, kind) for i in ROWS] for kind in (torch.float64, dtype)
        )
    for place, name in enumerate(("o", "lse")):
        rows = outputs[place][:, :, ROWS]
        truth, yardstick = (torch.cat([row[place] for row in rows], 2) for rows in (exact, same))
        # Within a tile, steps are added up in lse's precision.
        of_a_tile = None
        if isinstance(bias, biases.CumulativeBias):
            of_a_tile = torch.full_like(truth, 64 * bias.steps.abs().mean())
        yardstick = None if dtype == torch.float64 else yardstick
        assert_close_to_float64(rows, truth, yardstick, name, of_a_tile)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gradients_of_logits_add_up_to_those_of_lse_in_each_row(dtype):
    """The gradient of a running sum C_t is row t of dS minus its column t. The column is also the
    gradient of a last channel of k_t that q multiplies by 1 / scale: what is left is row t, whose
    sum is the gradient of lse."""
    case = Case("cumulative", dtype, lengths=(2000, 2000), dims=(17, 16), heads=(1, 1), batch=1)

    def sums(problem, attend):
        with torch.no_grad():
            problem.q[..., -1] = 1 / problem.scale
        results = evaluate(problem, attend)
        of_steps = results["gradient of steps"]
        # C_t is the sum of the steps up to t: differences undo the sum of its gradients.
        of_sums = of_steps - torch.nn.functional.pad(of_steps[..., 1:], (0, 1))
        return of_sums + results["gradient of k"][..., -1]

    problem = drawn(case)
    same = None if dtype == torch.float64 else sums(problem, naive)
    assert_close_to_float64(
        sums(problem, fused),
        problem.grad_lse.double(),
        same,
        "rows of dS",
        problem.grad_lse.double(),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_gradient_of_a_slope_follows_from_those_of_rows_and_columns(dtype):
    """sum_ij dS_ij (p_i - j) = sum_i p_i dlse_i - sum_j j (column j of dS)."""
    case = Case("linear", dtype, lengths=(1500, 2000), dims=(17, 16), heads=(2, 2), batch=1)
    problem = drawn(case)
    with torch.no_grad():
        problem.q[..., -1] = 1 / problem.scale

    def both_ways(attend) -> tuple[Tensor, Tensor]:
        results = evaluate(problem, attend)
        rows = problem.case.geometry.positions() * problem.grad_lse.double()
        columns = torch.arange(2000) * results["gradient of k"][..., -1].double()
        return -results["gradient of slopes"], (rows.sum(-1) - columns.sum(-1))[0]

    direct, indirect = both_ways(fused)
    naive_direct, naive_indirect = both_ways(naive)
    largest = (torch.arange(2000) * problem.grad_lse.double().abs().mean()).sum()
    same = None if dtype == torch.float64 else indirect + (naive_direct - naive_indirect)
    assert_close_to_float64(direct, indirect, same, "gradient of slopes", largest)


def test_all_gradients_of_a_table_add_up_to_those_of_lse():
    problem = drawn(Case("distance", lengths=(300, 2000), dims=(16, 16), batch=1))
    table = evaluate(problem)["gradient of r"].double().sum(1)
    yardstick = evaluate(problem, naive)["gradient of r"].double().sum(1)
    exact = problem.grad_lse.double().sum((0, 2))
    assert_close_to_float64(
        table.float(), exact, yardstick, "sum of dS", problem.grad_lse.double().abs().sum(2)
    )
