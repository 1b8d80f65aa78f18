"""Overheads of a call: memory, and time before and after the kernel."""

import os

import pytest
import torch

from bench.common.implementations import make_bias
from bench.common.layer import draw
from bench.common.measure import peak_memory
from biased_flash_attn import biased_flash_attn
from biased_flash_attn.cli.cost import CLEAR_REFS


@pytest.mark.skipif(not os.access(CLEAR_REFS, os.W_OK), reason="needs Linux's /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bias", ["kerple_log", "fire", "kernelized_cable"])
def test_peak_memory(record, length, bias, dtype):
    work = f"peak memory beyond inputs, outputs and gradients at N = {4 * length}, {bias}"
    record(work, dtype, [peak_memory(bias, dtype, 4 * length, "both")], " MiB", "<=", 64)


@pytest.mark.parametrize("bias", [None, "alibi"])
def test_call_overhead(benchmark, record, bias):
    inputs = draw(16, torch.float32)
    module = make_bias(bias, inputs)
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    form = module and module(inputs.x)
    benchmark.pedantic(
        biased_flash_attn, (q, k, v, form), rounds=20, iterations=500, warmup_rounds=2
    )
    microseconds = [1e6 * seconds for seconds in benchmark.stats.stats.data]
    work = f"forward call without gradients at N = 16, {bias or 'no bias'}"
    record(work, "float32", microseconds, " us", "<=", 60)
