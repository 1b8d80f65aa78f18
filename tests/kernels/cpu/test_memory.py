"""Calls need O(N) memory per thread beyond inputs, outputs and gradients."""

from __future__ import annotations

import subprocess
import sys

import pytest

MEASURE = """
import re
from pathlib import Path

import torch
from biased_flash_attn import biased_flash_attn, biases

def resident(field):
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\\s+(\\d+) kB", status)[1]) / 1024

torch.set_num_threads(2)
dtype = getattr(torch, "DTYPE")
heads, kv_heads = HEADS
bias = biases.KerpleLog(heads)

def call(length):
    q, k, v = (
        torch.zeros(1, h, length, 64, dtype=dtype).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    )
    grad = torch.zeros_like(q)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    o = biased_flash_attn(q, k, v, bias)
    torch.autograd.backward(o, grad)
    kept = sum(x.numel() * x.element_size() for x in (o, q.grad, k.grad, v.grad)) / 2**20
    return resident("VmHWM") - before - kept

call(128)
print(call(8192))
"""

PACKED = MEASURE.replace(
    "print(call(8192))",
    """
from biased_flash_attn import biased_flash_attn_varlen
lengths = torch.tensor([0] + 1000 * [8] + [4096])
offsets = lengths.cumsum(0).int()

def call(length):
    q, k, v = (torch.zeros(12096, heads, 64).requires_grad_() for _ in range(3))
    grad = torch.zeros_like(q)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    o = biased_flash_attn_varlen(q, k, v, offsets, offsets, bias)
    torch.autograd.backward(o, grad)
    kept = sum(x.numel() * x.element_size() for x in (o, q.grad, k.grad, v.grad)) / 2**20
    return resident("VmHWM") - before - kept

print(call(None))
""",
)

RELEASE = MEASURE.replace(
    "print(call(8192))",
    """
from biased_flash_attn import backends
call(8192)
before = resident("VmRSS")
backends.release_memory()
print(before - resident("VmRSS"))
call(128)
""",
)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("dtype", "heads"), [("float32", (8, 8)), ("bfloat16", (8, 8)), ("float32", (16, 1))]
)
def test_peak_memory_at_8192_tokens(dtype, heads):
    program = MEASURE.replace("DTYPE", dtype).replace("HEADS", str(heads))
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) <= 64, f"{run.stdout} MiB"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_release_memory_frees_workspaces():
    program = RELEASE.replace("DTYPE", "float32").replace("HEADS", "(8, 8)")
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) >= 8, f"{run.stdout} MiB"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_of_packed_sequences_of_unequal_length():
    """1001 tables of the length of the longest sequence would take 125 MiB."""
    program = PACKED.replace("DTYPE", "float32").replace("HEADS", "(8, 8)")
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) <= 64, f"{run.stdout} MiB"
