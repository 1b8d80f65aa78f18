"""The examples run; what they claim, they assert themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("window", [None, 24])
def test_generate(window):
    options = ["--steps", "2", "--tokens", "40", *(["--window", str(window)] if window else [])]
    done = subprocess.run(
        [sys.executable, EXAMPLES / "generate.py", *options], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("40 tokens with equal logits") == 15


def test_patch_bloom():
    command = [sys.executable, EXAMPLES / "patch_bloom.py", "--steps", "3", "--tokens", "12"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "gradients of all parameters" in done.stdout
    assert "12 tokens after each prompt" in done.stdout


def test_generate_refuses_other_biases():
    command = [sys.executable, EXAMPLES / "generate.py", "fire"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "bias is fire; it may be alibi" in done.stderr


def test_context_parallel():
    done = subprocess.run(
        [sys.executable, EXAMPLES / "context_parallel.py"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of 2 ranks equals that of one process") == 4
    assert "MB without skipping" in done.stdout
