"""Models on this package need memory proportional to the number of tokens."""

from __future__ import annotations

import sys

import pytest

from tests.support.allocations import output_of

MEASURE = """
import torch

from biased_flash_attn import backends
from tests.integrations.transformers.cases import *
from tests.support.allocations import peak_of

model = accelerated({make})

def train(length):
    mask = torch.ones(1, length).long()
    mask[:, {padding}] = 0
    inputs = inputs_of(model, 1, length, mask)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()

def peak(length):
    train(length)
    backends.release_memory()
    return peak_of(lambda: train(length)) / 2**20

print(peak(2048), peak(4096))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="preloads a library")
@pytest.mark.parametrize(
    ("make", "padding"),
    [
        ("t5(heads=2, d_kv=32, dropout_rate=0.0)", "-100:"),
        ("inkling(layers=2)", ":100"),
        ("inkling2(layers=2)", ":100"),
    ],
)
def test_memory_is_linear_in_the_tokens(make, padding, tmp_path):
    """A dense bias of two heads would take 128 MiB, and a mask of pairs at least 16 MiB."""
    measure = MEASURE.replace("{make}", make).replace("{padding}", padding)
    short, long = map(float, output_of(measure, tmp_path).split())
    assert long <= 2.1 * short
    assert long <= 96
