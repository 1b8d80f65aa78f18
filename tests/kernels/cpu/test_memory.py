"""Calls need O(N) memory per thread beyond inputs, outputs and gradients."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.allocations import output_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="preloads a library"),
]

MEASURE = """
import sys

import torch
from biased_flash_attn import backends, biased_flash_attn, biased_flash_attn_varlen, biases
from tests.support.allocations import allocated, peak_beyond_results

def measured(attend, *inputs):
    return peak_beyond_results(lambda: attend(*inputs), inputs, [torch.zeros_like(inputs[0])])

def inputs(shape, heads, kv_heads, dtype):
    make = lambda h: torch.zeros([h if n == "heads" else n for n in shape], dtype=dtype)
    return [make(h).requires_grad_() for h in (heads, kv_heads, kv_heads)]
"""

ONE_SEQUENCE = """
heads, kv_heads, dtype = int(sys.argv[1]), int(sys.argv[2]), getattr(torch, sys.argv[3])
bias = biases.KerpleLog(heads)
for length in (4096, 8192):
    qkv = inputs((1, "heads", length, 64), heads, kv_heads, dtype)
    print(measured(lambda q, k, v: biased_flash_attn(q, k, v, bias), *qkv))
"""

PACKED = """
bias = biases.KerpleLog(8)
offsets = torch.tensor([0] + 1000 * [8] + [4096]).cumsum(0).int()
qkv = inputs((12096, "heads", 64), 8, 8, torch.float32)
attend = lambda q, k, v: biased_flash_attn_varlen(q, k, v, offsets, offsets, bias)
print(measured(attend, *qkv))
"""

RELEASE = """
qkv = inputs((1, 8, 8192, 64), 8, 8, torch.float32)
biased_flash_attn(*qkv, biases.KerpleLog(8)).sum().backward()
before = allocated()
backends.release_memory()
print((before - allocated()) / 2**20)
biased_flash_attn(*qkv, biases.KerpleLog(8)).sum().backward()
"""


def mebibytes(script: str, directory: Path, *arguments: str) -> list[float]:
    return [float(x) for x in output_of(MEASURE + script, directory, *arguments).split()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [("8", "8"), ("16", "1")], ids=" ".join)
def test_peak_memory_at_8192_tokens(tmp_path, heads, dtype):
    short, long = mebibytes(ONE_SEQUENCE, tmp_path, *heads, dtype)
    assert long <= 64
    assert long <= 2.1 * short


def test_release_memory_frees_workspaces(tmp_path):
    (freed,) = mebibytes(RELEASE, tmp_path)
    assert freed >= 8


def test_peak_memory_of_packed_sequences_of_unequal_length(tmp_path):
    """1001 tables of the length of the longest sequence would take 125 MiB."""
    (peak,) = mebibytes(PACKED, tmp_path)
    assert peak <= 64
