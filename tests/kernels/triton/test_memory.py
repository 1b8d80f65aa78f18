"""Launches of the Triton kernels allocate O(N) memory beyond inputs, outputs and gradients."""

from __future__ import annotations

import sys

import pytest

from tests.kernels.triton.backend import KERNELS
from tests.support.allocations import output_of
from tests.support.biases import FORMS

pytestmark = [
    pytest.mark.slow,  # a process that imports PyTorch, and prepares 28 calls with 8192 tokens
    pytest.mark.skipif(KERNELS is None, reason="needs Triton"),
    pytest.mark.skipif(sys.platform != "linux", reason="preloads a library"),
]

# All that the launches allocate, on the CPU in place of a GPU; the kernels themselves are not run.
MEASURE = """
import sys
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from tests.emulator.triton_backend import emulated
from tests.emulator.triton_device import Device
from tests.support.allocations import peak_beyond_results
from tests.support.biases import FORMS
from tests.support.cases import Case
from tests.support.problems import drawn, fused

architecture, dtype, dim = int(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3])

def mebibytes(form, length):
    sizes = (length, length), (dim, dim), (8, 8)
    problem = drawn(Case(form, dtype, *sizes, batch=1))
    gradients = problem.grad_o, problem.grad_lse
    attend = lambda: fused(problem, "triton")
    return peak_beyond_results(attend, list(problem.leaves().values()), gradients)

launches_nothing = mock.patch.object(JITFunction, "run", lambda *_, **__: None)
with emulated(Device(architecture)), launches_nothing:
    for form in FORMS:
        print(form, *(mebibytes(form, length) for length in (4096, 8192)))
"""


@pytest.mark.parametrize("settings", ["90 bfloat16 64", "80 float32 128"])
def test_peak_memory_at_8192_tokens(tmp_path, settings):
    lines = output_of(MEASURE, tmp_path, *settings.split()).splitlines()
    peaks = {form: tuple(map(float, peaks)) for form, *peaks in map(str.split, lines)}
    assert peaks.keys() == FORMS.keys()
    for form, (short, long) in peaks.items():
        assert 0 < short < long <= 24, form
        assert long <= 2.1 * short, form
