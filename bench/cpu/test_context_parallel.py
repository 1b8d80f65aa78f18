"""Bytes sent between two ranks: with and without certified skipping."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench import ROOT

RANKS, SEEDS = 2, 3
MODULE = "bench.cpu.context_parallel"


def run(*arguments) -> int:
    """The bytes sent by the ranks, forward and backward, including control messages."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command = [sys.executable, *launcher, "-m", MODULE, *map(str, arguments)]
    found = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    return sum(json.loads(found).values())


@pytest.mark.parametrize(("bias", "target"), [("alibi", 0.25), ("type2", None), ("cable", None)])
def test_bytes_of_skipping(record, length, bias, target):
    whole = run(bias, "float32", 8 * length, 0.0, 0)
    ratios = [run(bias, "float32", 8 * length, None, seed) / whole for seed in range(SEEDS)]
    work = f"bytes of {RANKS} ranks at {8 * length}, {bias} against itself at tolerance 0"
    record(work, "float32", ratios, "x", target and "<=", target)
