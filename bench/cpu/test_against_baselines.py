"""Training against alternatives: forward and backward."""

import pytest
import torch

from bench.common.correctness import check, check_other
from bench.common.implementations import (
    ours,
    plain_pytorch,
    sdpa_with_dense_mask,
    sdpa_without_bias,
)
from bench.common.layer import draw
from bench.common.measure import alternate, seconds

# Our bias, the alternative, the target of the speedup by dtype, and the number of rounds.
CASES = {
    "kerple_log against plain PyTorch with autograd": (
        "kerple_log",
        plain_pytorch,
        {"float32": 8, "bfloat16": 18},
        5,
    ),
    "fire against plain PyTorch with autograd": (
        "fire",
        plain_pytorch,
        {"float32": 12, "bfloat16": 12},
        3,
    ),
    "sandwich against SDPA with a dense mask": (
        "sandwich",
        sdpa_with_dense_mask,
        {"float32": 2.7, "bfloat16": 3.8},
        9,
    ),
    "kerple_log against SDPA without bias": (
        "kerple_log",
        sdpa_without_bias,
        {"float32": 1.35, "bfloat16": 2.1},
        9,
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("work", CASES)
def test_faster(benchmark, record, length, work, dtype):
    bias, other, targets, rounds = CASES[work]
    torch_dtype = getattr(torch, dtype)
    check(bias, torch_dtype)
    if other is not sdpa_without_bias:
        check_other(other, bias, torch_dtype)

    inputs = draw(length, torch_dtype)
    mine, theirs = alternate(benchmark, ours(inputs, bias), seconds(other(inputs, bias)), rounds)
    ratios = [t / m for m, t in zip(mine, theirs, strict=True)]
    record(work, dtype, ratios, "x", ">=", targets[dtype], mine, theirs)
