"""What the compiler makes of the Triton kernels for processors that need not be here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}

pytest.importorskip("triton", reason="needs Triton")


@pytest.fixture(scope="module", params=SHARED_MEMORY, ids="sm_{}".format)
def processor(request):
    """An architecture and every kernel that ships for it, at one width of a head."""
    script = Path(__file__).with_name("compiled.py")
    done = subprocess.run(
        [sys.executable, script, str(request.param), "64"],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return request.param, [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_fits_shared_memory(processor):
    arch, kernels = processor
    assert kernels
    assert all(kernel["shared"] <= SHARED_MEMORY[arch] for kernel in kernels)


def test_no_loop_spills_registers(processor):
    _, kernels = processor
    assert [kernel for kernel in kernels if kernel["loops_spill"]] == []


def test_half_precision_runs_on_matrix_units(processor):
    _, kernels = processor
    multiply = [
        kernel
        for kernel in kernels
        if kernel["dtype"] == "bfloat16" and "delta" not in kernel["kernel"]
    ]
    multiply = [kernel for kernel in multiply if kernel["kernel"] != "key_factors_kernel"]
    assert multiply
    assert [kernel for kernel in multiply if not kernel["matrix"]] == []
