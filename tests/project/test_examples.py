"""The examples run, and assert their results themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from biased_flash_attn import biases

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_train():
    done = run("train.py", "--steps", "40")
    assert done.returncode == 0, done.stderr
    for bias in ("alibi", "cable"):
        assert f"{bias}: loss" in done.stdout


@pytest.mark.slow
def test_train_fails_if_nothing_is_learned():
    done = run("train.py", "alibi", "--steps", "1")
    assert done.returncode == 1
    assert "the model did not learn" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 24])
def test_serve(window):
    options = ["--window", str(window)] if window else []
    done = run("serve.py", "--steps", "2", "--tokens", "26", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("26 steps with equal logits") == len(biases.NAMED)


@pytest.mark.slow
def test_patch_bloom():
    done = run("patch_bloom.py", "--steps", "3", "--tokens", "12")
    assert done.returncode == 0, done.stderr
    assert "gradients of all parameters" in done.stdout
    assert "12 tokens after each prompt" in done.stdout


@pytest.mark.slow
def test_context_parallel():
    done = run("context_parallel.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of 2 ranks equals that of one process") == 4
    assert "MB without skipping" in done.stdout


@pytest.mark.parametrize("example", ["train.py", "serve.py"])
def test_other_biases_are_refused(example):
    done = run(example, "rope")
    assert done.returncode == 2
    assert "bias is rope; it may be alibi" in done.stderr


def run(example: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLES / example, *options]
    return subprocess.run(command, capture_output=True, text=True)
