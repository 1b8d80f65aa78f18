"""A dense bias: training time compared with PyTorch and with the peak of the processor."""

import pytest
import torch
from torch.nn import functional as F

from bench.common.correctness import check_float64
from bench.common.layer import HEAD_DIM, HEADS, Inputs, Training, draw
from bench.common.measure import alternate, seconds
from biased_flash_attn import biased_flash_attn, biases

CHECKED = 330  # tokens of the comparison of results
ROUNDS = 5
PRODUCTS = 7  # 2 matrix products forward and 5 backward


def matrix(inputs: Inputs) -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(1)
    (heads, n), dtype = inputs.q.shape[1:3], inputs.q.dtype
    return torch.nn.Parameter(torch.randn(1, heads, n, n, generator=generator, dtype=dtype))


def hidden(n: int) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.bool).triu_(1)


class Pairs(torch.nn.Module):
    def __init__(self, pairs: torch.nn.Parameter):
        super().__init__()
        self.pairs = pairs


def ours(inputs: Inputs, *, causal: bool, trained: bool) -> Training:
    pairs = matrix(inputs).requires_grad_(trained)
    q, k, v, bias = inputs.q, inputs.k, inputs.v, biases.DenseBias(pairs)
    return Training(
        inputs,
        lambda: biased_flash_attn(q, k, v, bias, causal=causal, backend="cpu"),
        Pairs(pairs),
    )


def sdpa(inputs: Inputs, *, causal: bool) -> Training:
    """With the same matrix, masked beforehand, which gets no gradient."""
    q, k, v, pairs = inputs.q, inputs.k, inputs.v, matrix(inputs).detach()
    if causal:
        pairs.masked_fill_(hidden(q.shape[2]), -torch.inf)
    return Training(inputs, lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=pairs))


def plain_pytorch(inputs: Inputs) -> Training:
    """Causal, with the gradient of the matrix."""
    q, k, v, pairs = inputs.q, inputs.k, inputs.v, matrix(inputs)
    scale, masked = q.shape[3] ** -0.5, hidden(q.shape[2])

    def attend() -> torch.Tensor:
        return (scale * q @ k.mT + pairs).masked_fill(masked, -torch.inf).softmax(-1) @ v

    return Training(inputs, attend, Pairs(pairs))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
def test_against_sdpa(benchmark, record, length, causal, dtype):
    small = draw(CHECKED, torch.float64)
    check_float64(ours(small, causal=causal, trained=False)(), sdpa(small, causal=causal)())
    inputs = draw(length, getattr(torch, dtype))
    mine, theirs = alternate(
        benchmark,
        ours(inputs, causal=causal, trained=False),
        seconds(sdpa(inputs, causal=causal)),
        ROUNDS,
    )
    ratios = [t / m for m, t in zip(mine, theirs, strict=True)]
    work = f"a dense bias against SDPA with it, {'causal' if causal else 'not causal'}"
    target = {"float32": 2.2, "bfloat16": 3}[dtype]
    record(work, dtype, ratios, "x", ">=", target, mine, theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_gradient(benchmark, record, length, dtype):
    small = draw(CHECKED, torch.float64)
    check_float64(ours(small, causal=True, trained=True)(), plain_pytorch(small)())
    inputs = draw(length, getattr(torch, dtype))
    mine, theirs = alternate(
        benchmark,
        ours(inputs, causal=True, trained=True),
        seconds(plain_pytorch(inputs)),
        ROUNDS,
    )
    ratios = [t / m for m, t in zip(mine, theirs, strict=True)]
    work = "a trained dense bias against plain PyTorch with autograd"
    record(work, dtype, ratios, "x", ">=", 4, mine, theirs)


def test_sdpa_against_fma_peak(benchmark, record, length, fma_peak):
    """How much faster than SDPA any kernel of float32 could be that sees all pairs."""
    other = sdpa(draw(length, torch.float32), causal=False)
    flop = 2 * PRODUCTS * HEAD_DIM * HEADS * length**2
    taken, least = alternate(benchmark, other, lambda: flop / fma_peak(), ROUNDS)
    ratios = [t / m for m, t in zip(least, taken, strict=True)]
    work = "SDPA with a dense bias, not causal, against its matrix products at the FMA peak"
    record(work, "float32", ratios, "x", ">=", 1, least, taken)
