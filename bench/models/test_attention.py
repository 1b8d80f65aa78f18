"""Attention of models of transformers: training steps, against the attention that they have.

The models are reduced to their attention: linear layers return fixed rows. Work that a model does
once for all layers, a mask or a bias, is included, and so are norms.
"""

import pytest
import torch

from bench.common.growth import growth
from bench.common.measure import alternate, seconds
from bench.models.subjects import SUBJECTS, Training

ROUNDS = 3
CHECKED_LENGTH = 330


def check(name: str) -> None:
    """Fails if outputs or gradients differ by more than rounding.

    Gradients that are far smaller than others are sums whose terms cancel.
    """
    ours, own = (Training(name, CHECKED_LENGTH, accelerated=a) for a in (True, False))
    expected = own()
    sizes = {key: x.abs().max().item() for key, x in expected.items()}
    least = 1e-3 * max(sizes.values())
    results = ours()
    assert results.keys() == expected.keys()
    for key, found in results.items():
        size = max(sizes[key], least)
        torch.testing.assert_close(found, expected[key], rtol=0, atol=2e-5 * size)


def described(name: str) -> str:
    subject = SUBJECTS[name]
    return f"{subject.family}: {subject.shape}, {subject.length} tokens"


@pytest.mark.parametrize("name", SUBJECTS)
def test_attention_is_faster(benchmark, record, name):
    check(name)
    length = SUBJECTS[name].length
    ours, own = (Training(name, length, accelerated=a) for a in (True, False))
    mine, others = alternate(benchmark, ours, seconds(own), ROUNDS)
    ratios = [other / m for m, other in zip(mine, others, strict=True)]
    work = f"{described(name)}, against {own.model.config._attn_implementation}"
    record(work, "float32", ratios, "x", ">=", 1, mine, others)


@pytest.mark.parametrize("name", SUBJECTS)
def test_needs_less_memory(record, name):
    ours, own = (
        growth(Training, name, SUBJECTS[name].length, accelerated=x) for x in (True, False)
    )
    record(f"peak memory of {described(name)}", "float32", [100 * ours / own], " %", "<=", 100)
