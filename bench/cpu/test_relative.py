"""Biases of queries and distances: training time and memory, compared with alternatives."""

import os

import pytest
import torch

from bench.common.correctness import check_float64
from bench.common.layer import HEAD_DIM, draw
from bench.common.measure import alternate, peak_memory, seconds
from bench.common.relative import (
    MAKE,
    factor_bytes,
    ours,
    plain_pytorch,
    sdpa_with_dense_bias,
    transformers_layer,
    without_bias,
)
from bench.reports.results import three_digits
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
    "shaw against plain PyTorch with autograd": (
        ("shaw", HEAD_DIM),
        plain_pytorch,
        {"float32": 6, "bfloat16": 10},
    ),
    "gated_table against plain PyTorch with autograd": (
        ("gated_table", HEAD_DIM),
        plain_pytorch,
        {"float32": 6, "bfloat16": 10},
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


# The bias, its channels of a head, the factor of the length, the target of the relative time in
# float32 and bfloat16, and the number of rounds.
COSTS = [
    ("banded", WIDE, 1, (1.20, 1.20), 9),
    ("banded", WIDE, 4, (1.06, 1.06), 3),
    ("shaw", HEAD_DIM, 1, (None, None), 9),
    ("transformer_xl", HEAD_DIM, 1, (None, None), 9),
    ("disentangled", HEAD_DIM, 1, (None, None), 9),
    ("gated_table", HEAD_DIM, 1, (None, None), 9),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "head_dim", "times", "targets", "rounds"), COSTS)
def test_cost(benchmark, record, length, dtype, name, head_dim, times, targets, rounds):
    inputs = draw(times * length, getattr(torch, dtype), head_dim)
    with_bias, without = alternate(
        benchmark,
        ours(inputs, name, tolerance=0.0),
        seconds(without_bias(inputs, name)),
        rounds,
    )
    ratios = [w / o for w, o in zip(with_bias, without, strict=True)]
    work = f"{name} against no bias at N = {times * length}, D = {head_dim}"
    target = targets[dtype == "bfloat16"]
    record(work, dtype, ratios, "x", "<=", target, with_bias, without)


@pytest.mark.skipif(not os.access(CLEAR_REFS, os.W_OK), reason="needs Linux's /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("direction", ["forward", "both"])
@pytest.mark.parametrize("bias", MAKE)
def test_peak_memory(record, length, bias, dtype, direction):
    """Factors and tables are O(N rank) for each head; the target is for what comes on top."""
    inputs = draw(4 * length, getattr(torch, dtype))
    own = factor_bytes(inputs, bias, trained=direction == "both") / 2**20
    needed = peak_memory(bias, dtype, 4 * length, direction)
    passes = {"forward": "forward only", "both": "forward and backward"}[direction]
    work = f"peak memory at N = {4 * length}, {bias}, {passes}; factors: {three_digits(own)} MiB"
    record(work, dtype, [needed], " MiB", "<=", round(own + 64, 1))
