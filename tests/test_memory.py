"""Memory beyond inputs, outputs and gradients is O(N) a thread, where dense attention needs N^2."""

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
bias = biases.KerpleLog(8)

def call(length):
    q, k, v = (torch.zeros(1, 8, length, 64, dtype=dtype).requires_grad_() for _ in range(3))
    grad = torch.zeros_like(q)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    o = biased_flash_attn(q, k, v, bias)
    torch.autograd.backward(o, grad)
    kept = sum(x.numel() * x.element_size() for x in (o, q.grad, k.grad, v.grad)) / 2**20
    return resident("VmHWM") - before - kept

call(128)
print(call(16384))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory_at_16384_tokens(dtype):
    program = MEASURE.replace("DTYPE", dtype)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) <= 64, f"{run.stdout} MiB"
