"""Finite biases are finite logits, up to the largest number: only -inf masks a pair."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from biased_flash_attn import KVCache, biased_flash_attn, biased_flash_attn_with_kvcache, biases
from biased_flash_attn.forms import Distance, Normalized
from tests.decoding.cases import decoded
from tests.support.biases import SlopesOfSequences
from tests.support.cases import Case
from tests.support.lowered import LoweredTo
from tests.support.numerics import assert_close_to_float64
from tests.support.problems import Problem, drawn, evaluate, fused, magnitudes, naive, outputs

BOTH_MASKS = pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])


@pytest.fixture
def attend(backend):
    return functools.partial(fused, backend=backend)


def assert_close(o: Tensor, exact: Tensor, baseline: Tensor | None = None) -> None:
    """Without a baseline, for rows whose weights are equal or 0."""
    assert_close_to_float64(o, exact, baseline, "o", exact.abs().max())


def dense(dtype: torch.dtype, causal: bool) -> Problem:
    """Row 30 has only the lowest number, row 40 also -inf, and row 50 nothing else; key 5 has the
    lowest number for all queries."""
    problem = drawn(Case("dense", dtype, (70, 90), heads=(2, 1), causal=causal))
    with torch.no_grad():
        bias = problem.bias.tensor
        lowest = torch.finfo(bias.dtype).min
        bias[..., 5] = bias[..., 30:41, :] = lowest
        bias[..., 40, :20] = bias[..., 50, :] = -torch.inf
    return problem


@BOTH_MASKS
def test_a_row_of_the_lowest_number_averages_v(causal, drawn_dtype, backend, attend):
    skip_without_kernels("dense", backend)
    dtypes = [torch.float64, torch.float32, torch.bfloat16] if backend == "cpu" else [drawn_dtype]
    for dtype in dtypes:
        problem = dense(dtype, causal)
        o, lse = attend(problem)
        exact, _ = naive(problem.double())
        last = 51 if causal else 90
        mean = problem.v.double()[:, :, :last].mean(2).expand(-1, 2, -1)
        torch.testing.assert_close(exact[:, :, 30], mean)
        assert_close(o, exact, naive(problem)[0])
        assert (o[:, :, 50] == 0).all()
        assert (lse[:, :, 50] == -torch.inf).all()
        others = lse[:, :, torch.arange(70) != 50]
        assert others.isfinite().all()
        assert (lse[:, :, 30:41] < -2e38).all()


@pytest.mark.parametrize("value", [0.0, 30.0, -1e4, 1e9, torch.finfo(torch.float32).min])
def test_weights_of_a_row_sum_to_1_in_the_backward_pass(value):
    """However large lse is: it is not rounded to one float32 number between the passes."""
    q, k = 3 * torch.randn(1, 4, 1, 32), 6 * torch.randn(1, 4, 130, 32)
    v = torch.randn(1, 4, 130, 8, requires_grad=True)
    o = biased_flash_attn(q, k, v, biases.DenseBias(torch.full((1, 130), value)))
    (grad_v,) = torch.autograd.grad(o.sum(), v)
    # Each weight has the error of exp2, that of log2 of the sum, and a rounding.
    assert ((grad_v.double().sum(2) - 1).abs() < 2**-21).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@BOTH_MASKS
def test_gradients_of_low_rows_are_those_of_their_weights(causal, dtype):
    """The weights cannot be computed from lse alone, whose rounding loses the logarithm of the
    number of keys."""
    problem = dense(dtype, causal)
    with torch.no_grad():
        problem.bias.tensor[..., 60, :] = -1e20
    exact = evaluate(problem.double(), naive)
    found = evaluate(problem)
    with torch.no_grad():
        bias = problem.bias.tensor
        bias[bias.abs() > 1e3] = 0  # the sizes of weights, not of logits
    sums = magnitudes(problem.double(), dtype)
    for name in exact.keys() - {"lse"}:
        assert_close_to_float64(found[name], exact[name], None, name, sums[name])


def test_a_mask_of_the_lowest_bfloat16_is_finite(backend):
    skip_without_kernels("dense", backend)
    q, k, v = torch.randn(3, 1, 2, 40, 16).bfloat16()
    mask = torch.zeros(40, 40, dtype=torch.bfloat16)
    mask[7] = torch.finfo(torch.bfloat16).min
    bias = biases.DenseBias(mask)
    o, lse = biased_flash_attn(q, k, v, bias, return_lse=True, backend=backend)
    assert_close(o[:, :, 7], v.double()[:, :, :8].mean(2))
    assert lse.isfinite().all()


def skip_without_kernels(bias: str, backend: str) -> None:
    if backend == "cuda" and bias.startswith(("dense", "normalized")):
        pytest.skip("it has no kernels for this form")


# By the CUDA kernels, as docs/numerics.md says of gains.
WITHOUT_GRADIENTS = ("cumulative-gain", "relative_last")


def of_one_key(bias: str, dtype: torch.dtype, causal: bool, size: float) -> Problem:
    """A problem whose biases, multiplied by `size`, leave one key per query with weight."""
    problem = drawn(Case(bias, dtype, (90, 130), heads=(2, 1), batch=1, causal=causal))
    with torch.no_grad():
        for name, x in problem.bias.named_parameters():
            if isinstance(problem.bias, SlopesOfSequences):
                x.copy_(torch.where(x > 0, 3e38, -3e38))
            elif name in ("r", "tensor", "values", "query_tables", "key_tables", "gain"):
                x.clamp_(-1.5, 1.5).mul_(size)
    return problem


@BOTH_MASKS
@pytest.mark.parametrize(
    ("bias", "size"),
    [
        ("linear-batch", 1),
        ("distance", 2.0**122),
        ("dense", 2.0**126),
        ("cumulative-gain", 2.0**126),
        ("log1p_square-gain", 2.0**100),
        ("normalized-heads", 2.0**118),
        ("relative_last", 2.0**121),
    ],
)
def test_the_largest_biases_select_keys(bias, size, causal, drawn_dtype, backend, attend):
    skip_without_kernels(bias, backend)
    dtypes = [torch.float64, torch.float32, torch.bfloat16] if backend == "cpu" else [drawn_dtype]
    if backend != "cpu" and bias.startswith("relative"):
        dtypes = [torch.bfloat16]  # that of q is also that of the vectors
    for dtype in dtypes:
        problem = of_one_key(bias, dtype, causal, size)
        evaluated = outputs if backend == "cuda" and bias in WITHOUT_GRADIENTS else evaluate
        found = evaluated(problem, attend)
        assert all(x.isfinite().all() for x in found.values())
        assert_close(found["o"], naive(problem.double())[0])


def of_function(gain: float, table: Tensor, slope: float) -> LoweredTo:
    """f(gain t) = slope gain t, with its only knot beyond all values."""
    knots = torch.full((1, 1, 1), 64.0)
    slopes, intercepts = torch.full((1, 1, 2), slope), torch.zeros(1, 1, 2)
    gains = torch.full((1, 1, len(table)), gain)
    return LoweredTo(Normalized(table[None, None], gains, knots, slopes, intercepts))


@pytest.mark.parametrize("slope", [1e38, 3e38])
def test_values_of_a_function_saturate(slope, backend):
    skip_without_kernels("normalized", backend)
    q, k, v = torch.randn(3, 1, 2, 40, 16).bfloat16()
    table = torch.zeros(40)
    table[3] = 4.0  # its value exceeds the largest number
    bias = of_function(1.0, table, slope)
    o, lse = biased_flash_attn(q, k, v, bias, causal=True, return_lse=True, backend=backend)
    assert torch.equal(o[:, :, 3:], v[:, :, :-3])
    assert lse.isfinite().all()
    cache = KVCache(1, 2, 16, 16, dtype=q.dtype)
    o = biased_flash_attn_with_kvcache(q, cache, k, v, bias, backend=backend)
    assert torch.equal(o[:, :, 3:], v[:, :, :-3])


def lines(table: Tensor, slopes: list[float], intercepts: list[float]) -> LoweredTo:
    """f(t) with a knot at 2."""
    of_lines = (torch.tensor([[x]]) for x in (slopes, intercepts))
    table, gains = table[None, None], torch.ones(1, 1, table.shape[0])
    return LoweredTo(Normalized(table, gains, torch.full((1, 1, 1), 2.0), *of_lines))


FAR = torch.linspace(-4, 4, 10)
LARGE_FUNCTIONS = {
    "minus infinity": lines(torch.where(FAR > 3, -torch.inf, FAR), [3e38, 3e38], [0.0, 0.0]),
    "intercepts": lines(FAR, [0.0, 0.0], [-1e38, -2e38]),
    "small values": lines(1e-38 * torch.rand(10), [3e38, 3e38], [0.0, 0.0]),
    "equal values": lines(torch.where(FAR > 3, 4.5, FAR), [3e38, 3e38], [0.0, 0.0]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", LARGE_FUNCTIONS.values(), ids=LARGE_FUNCTIONS)
def test_functions_with_large_products_are_those_of_decoding_and_the_reference(bias, dtype):
    q, k, v = torch.randn(3, 1, 2, 10, 16).to(dtype)
    exact = biased_flash_attn(q.float(), k.float(), v.float(), bias, backend="reference").double()
    assert_close(biased_flash_attn(q, k, v, bias), exact)
    cache = KVCache(1, 2, 16, 16, dtype=dtype)
    assert_close(biased_flash_attn_with_kvcache(q, cache, k, v, bias), exact)


def test_infinite_entries_of_a_table_are_not_saturated(drawn_dtype, backend):
    q, k, v = torch.randn(3, 1, 2, 40, 16).to(drawn_dtype)
    table = torch.zeros(2, 40)
    table[0, 3], table[1, 5] = torch.inf, -torch.inf
    bias = LoweredTo(Distance(table[None]))
    if backend == "cpu":
        with pytest.raises(ValueError, match="table values contain inf; they must be finite"):
            biased_flash_attn(q, k, v, bias, backend=backend)
        return
    o = biased_flash_attn(q, k, v, bias, backend=backend)
    expected = biased_flash_attn(q, k, v, bias, backend="reference")
    assert torch.equal(o.isnan(), expected.isnan())
    assert o[:, 1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_saturated_beta_has_no_gradient(dtype):
    q, k, v = (torch.randn(1, 2, n, 8, dtype=dtype) for n in (20, 10, 10))
    steps = torch.rand(1, 2, 10) + 1
    steps[..., 5:] += 8
    gain = torch.full((1, 2, 20), 2.0**61)
    found = []
    for backend in ("cpu", "reference"):
        leaf = steps.clone().requires_grad_()
        bias = biases.CumulativeBias(leaf, gain, "log1p_square")
        o = biased_flash_attn(q, k, v, bias, causal=False, backend=backend)
        found += torch.autograd.grad(o.square().sum(), leaf)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("gain", [2.0**80, 2.0**-80])
def test_gains_of_a_function_have_any_size(gain, backend):
    skip_without_kernels("normalized", backend)
    q, k, v = torch.randn(3, 1, 2, 40, 16).bfloat16()
    table = torch.rand(40)
    found, expected = (
        biased_flash_attn(q, k, v, bias, causal=True, backend=backend)
        for bias in (of_function(gain, table / gain, -2.0), of_function(1.0, table, -2.0))
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, 3e38, -1e20])
@pytest.mark.parametrize("bias", ["dense", "distance", "linear-batch", "cumulative-gain"])
def test_decoded_logits_of_large_biases_are_finite(bias, value, drawn_dtype, backend):
    if backend == "cuda":
        pytest.skip("it has no kernels for decoding")
    problem = drawn(Case(bias, drawn_dtype, (70, 70), heads=(2, 1), batch=1))
    with torch.no_grad():
        for x in problem.bias.parameters():
            x.fill_(value)
        if bias == "cumulative-gain":
            problem.bias.steps.fill_(0.5)
    cache = KVCache(1, 1, 16, 16, dtype=drawn_dtype)
    o, lse = decoded(problem, cache, [30, 1, 39], backend)
    exact, _ = naive(problem.double())
    assert_close(o, exact)
    assert lse.isfinite().all()
