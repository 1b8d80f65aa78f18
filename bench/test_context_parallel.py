"""What two ranks send each other with certified skipping, and without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RANKS, SEEDS = 2, 3
SCRIPT = Path(__file__).with_name("context_parallel.py")


def run(*arguments) -> int:
    """The bytes that the ranks send, forward and backward, control messages included."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command = [sys.executable, *launcher, SCRIPT, *map(str, arguments)]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return sum(json.loads(found).values())


@pytest.mark.parametrize(("bias", "target"), [("alibi", 0.25), ("type2", None), ("cable", None)])
def test_bytes_of_skipping(record, length, bias, target):
    whole = run(bias, "float32", 8 * length, 0.0, 0)
    shares = [run(bias, "float32", 8 * length, None, seed) / whole for seed in range(SEEDS)]
    work = f"bytes of {RANKS} ranks at {8 * length}, {bias} against itself at tolerance 0"
    record(work, "float32", shares, "x", target and "<=", target)
