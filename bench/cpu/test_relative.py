"""Biases of queries and distances: training time and memory, compared with alternatives."""

import os

import pytest
import torch

from bench.common import implementations
from bench.common.correctness import check_float64
from bench.common.layer import HEAD_DIM, draw
from bench.common.measure import alternate, peak_memory, seconds
from bench.common.relative import (
    ours,
    plain_pytorch,
    sdpa_with_dense_bias,
    transformers_layer,
)
from biased_flash_attn.cli.cost import CLEAR_REFS

WIDE = 128  # channels of a head with the banded bias
CHECKED = 330  # tokens of the comparison of results

# The bias, its channels of a head, the alternative, and the target of the speedup by dtype.
CASES = {
    "banded against SDPA with a dense bias, made anew and not trained": (
        ("banded", WIDE),
        sdpa_with_dense_bias,
        {"float32": 3, "bfloat16": 3},
    ),
    "banded against plain PyTorch with autograd": (
        ("banded", WIDE),
        plain_pytorch,
        {"float32": 12, "bfloat16": 20},
    ),
    "transformer_xl against plain PyTorch with autograd": (
        ("transformer_xl", HEAD_DIM),
        plain_pytorch,
        {"float32": 6, "bfloat16": 10},
    ),
    "disentangled against transformers' DeBERTa v2": (
        ("disentangled", HEAD_DIM),
        transformers_layer,
        {"float32": 5, "bfloat16": 5},
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("work", CASES)
def test_faster(benchmark, record, length, work, dtype):
    (name, head_dim), other, targets = CASES[work]
    inputs = draw(CHECKED, torch.float64, head_dim)
    check_float64(ours(inputs, name)(), other(inputs, name)())
    inputs = draw(length, getattr(torch, dtype), head_dim)
    mine, theirs = alternate(benchmark, ours(inputs, name), seconds(other(inputs, name)), 3)
    ratios = [t / m for m, t in zip(mine, theirs, strict=True)]
    record(f"{work}, D = {head_dim}", dtype, ratios, "x", ">=", targets[dtype], mine, theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("times", "target", "rounds"), [(1, 1.20, 9), (4, 1.06, 3)])
def test_cost_of_band(benchmark, record, length, dtype, times, target, rounds):
    inputs = draw(times * length, getattr(torch, dtype), WIDE)
    with_bias, without = alternate(
        benchmark,
        ours(inputs, "banded", tolerance=0.0),
        seconds(implementations.ours(inputs, None)),
        rounds,
    )
    ratios = [w / o for w, o in zip(with_bias, without, strict=True)]
    work = f"banded against no bias at N = {times * length}, D = {WIDE}"
    record(work, dtype, ratios, "x", "<=", target, with_bias, without)


@pytest.mark.skipif(not os.access(CLEAR_REFS, os.W_OK), reason="needs Linux's /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bias", ["banded", "transformer_xl", "disentangled"])
def test_peak_memory(record, length, bias, dtype):
    work = f"peak memory beyond inputs, outputs and gradients at N = {4 * length}, {bias}"
    record(work, dtype, [peak_memory(bias, dtype, 4 * length)], " MiB", "<=", 64)
