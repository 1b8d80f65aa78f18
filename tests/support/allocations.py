"""Counts the memory that a script requests. Unlike resident memory, it is the same in every run."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from biased_flash_attn import backends

SOURCE = Path(__file__).with_name("allocations.c")


def output_of(script: str, directory: Path, *arguments: str) -> str:
    """The output of a script that may call the functions below."""
    library = directory / "allocations.so"
    compiler = ["cc", "-O2", "-fPIC", "-shared"]
    subprocess.run([*compiler, str(SOURCE), "-o", str(library)], check=True)
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=SOURCE.parents[2],
        env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def allocated() -> int:
    return _counted("allocated_bytes")


def peak_of(call: Callable[[], object]) -> int:
    """The most bytes that a call holds at a time, its results included."""
    before = allocated()
    ctypes.CDLL(None).reset_peak_of_allocated_bytes()
    results = call()
    peak = _counted("peak_of_allocated_bytes")
    del results
    return peak - before


def peak_beyond_results(
    attend: Callable[[], Tensor | Sequence[Tensor]],
    inputs: Sequence[Tensor],
    grad_outputs: Sequence[Tensor],
) -> float:
    """The most MiB that a forward and backward pass holds at a time, outputs and gradients of the
    inputs excepted. It runs twice, and what it allocates once is not counted."""

    def call():
        outputs = attend()
        torch.autograd.backward(outputs, grad_outputs)
        return outputs

    call()
    for x in inputs:
        x.grad = None
    backends.release_memory()
    results = sum(x.nbytes for x in (*inputs, *grad_outputs))
    return (peak_of(call) - results) / 2**20


def _counted(name: str) -> int:
    function = getattr(ctypes.CDLL(None), name)
    function.restype = ctypes.c_size_t
    return function()
