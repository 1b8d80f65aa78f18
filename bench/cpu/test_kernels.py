"""Biases against none: our kernels without skipping, and the peak of the processor."""

import pytest
import torch

from bench.common.correctness import check
from bench.common.implementations import make_bias, ours
from bench.common.layer import HEAD_DIM, HEADS, draw
from bench.common.measure import alternate, seconds
from biased_flash_attn import biased_flash_attn

ROUNDS = 31  # many, as both sides differ by only a few percent

# the permitted relative time of a bias in float32 and in bfloat16
COSTS = {
    "alibi": (1.05, 1.10),
    "kerple_log": (1.05, 1.10),
    "sandwich": (1.05, 1.10),
    "t5": (1.05, 1.10),
    "fire": (1.50, 1.50),
    "cable": (1.05, 1.10),
    "cable, given steps": (1.05, 1.10),
    "forget_gate": (1.05, 1.10),
    "forget_gate, given steps": (1.05, 1.10),
    "kernelized_cable": (1.25, 1.35),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bias", COSTS)
def test_cost_of_bias(benchmark, record, length, bias, dtype):
    torch_dtype = getattr(torch, dtype)
    check(bias, torch_dtype)
    inputs = draw(length, torch_dtype)
    with_bias, without = alternate(
        benchmark, ours(inputs, bias, tolerance=0.0), seconds(ours(inputs, None)), ROUNDS
    )
    ratios = [w / o for w, o in zip(with_bias, without, strict=True)]
    target = COSTS[bias][dtype == "bfloat16"]
    record(f"{bias} against no bias", dtype, ratios, "x", "<=", target, with_bias, without)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wide_heads(benchmark, record, length, dtype):
    torch_dtype = getattr(torch, dtype)
    check("kerple_log", torch_dtype, 2 * HEAD_DIM)
    wide = ours(draw(length, torch_dtype, 2 * HEAD_DIM), "kerple_log", tolerance=0.0)
    usual = ours(draw(length, torch_dtype), "kerple_log", tolerance=0.0)
    twice, once = alternate(benchmark, wide, seconds(usual), ROUNDS)
    percentages = [100 * 2 * o / t for t, o in zip(twice, once, strict=True)]
    work = "FLOP/s at D = 128 against D = 64, kerple_log"
    record(work, dtype, percentages, " %", ">=", 90, twice, once)


@pytest.mark.parametrize("bias", [None, "sandwich"])
def test_fraction_of_fma_peak(benchmark, record, length, fma_peak, bias):
    check(bias, torch.float32)
    inputs = draw(length, torch.float32)
    module = make_bias(bias, inputs)
    useful_flop = 2 * 2 * HEAD_DIM * HEADS * length * (length + 1) / 2

    @torch.no_grad()
    def forward():
        form = module and module(inputs.x)
        biased_flash_attn(inputs.q, inputs.k, inputs.v, form, tolerance=0.0, backend="cpu")

    taken, least = alternate(benchmark, forward, lambda: useful_flop / fma_peak(), ROUNDS)
    percentages = [100 * least_s / taken_s for taken_s, least_s in zip(taken, least, strict=True)]
    work = f"forward alone, useful FLOP/s against the FMA peak, {bias or 'no bias'}"
    record(work, "float32", percentages, " %", ">=", 75, taken, least)
