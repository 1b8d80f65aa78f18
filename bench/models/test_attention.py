"""Models of transformers: on this package, compared with their own eager attention.

Times are those of attention alone: the other layers of the models, such as projections and MLPs,
return tensors that were drawn beforehand. Work that a model does once for all layers, a mask or a
bias, is included. Memory is that of the whole models.
"""

import subprocess
import sys

import pytest
import torch

from bench import ROOT
from bench.common.measure import alternate, seconds
from bench.cpu.models import SUBJECTS, Training

ROUNDS = 2  # eager attention takes half a minute
CHECKED_LENGTH = 330


def check(name: str) -> None:
    """Fails if outputs or gradients differ by more than rounding."""
    ours, theirs = (
        Training(name, CHECKED_LENGTH, alone=True, accelerated=a) for a in (True, False)
    )
    expected = theirs()
    for key, found in ours().items():
        size = expected[key].abs().max().item()
        torch.testing.assert_close(found, expected[key], rtol=0, atol=1e-5 * size)


def described(name: str) -> str:
    subject = SUBJECTS[name]
    return f"{name}, {subject.heads} heads, {subject.length} tokens, against transformers' eager"


@pytest.mark.parametrize("name", SUBJECTS)
def test_attention_is_faster(benchmark, record, name):
    check(name)
    length = SUBJECTS[name].length
    ours, theirs = (Training(name, length, alone=True, accelerated=a) for a in (True, False))
    mine, others = alternate(benchmark, ours, seconds(theirs), ROUNDS)
    ratios = [other / m for m, other in zip(mine, others, strict=True)]
    record(f"attention of {described(name)}", "float32", ratios, "x", ">=", 3, mine, others)


@pytest.mark.parametrize("name", SUBJECTS)
def test_needs_less_memory(record, name):
    ratio = 100 * memory(name, "accelerated") / memory(name, "eager")
    record(f"peak memory of {described(name)}", "float32", [ratio], " %", "<=", 60)


def memory(name: str, side: str) -> float:
    length = str(SUBJECTS[name].length)
    command = [sys.executable, "-m", "bench.cpu.model_memory", name, length, side]
    return float(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
