"""Targets of the Makefile run what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REHEARSALS = "tests/bench/test_gpu.py"  # of benchmarks, which replace a GPU


@pytest.mark.slow  # as all tests are collected
def test_gpu_test_runs_every_test_of_gpu_kernels():
    command = subprocess.check_output(["make", "--dry-run", "gpu-test"], cwd=ROOT, text=True)
    given = {Path(path) for path in re.findall(r"\btests/\S+", command)}
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-m", "kernels", "tests"]
    listed = subprocess.check_output(collect, cwd=ROOT, text=True)
    files = {Path(path) for path in re.findall(r"^(tests/\S+\.py)", listed, re.MULTILINE)}
    assert {path for path in files if not given.intersection([path, *path.parents])} == {
        Path(REHEARSALS)
    }
