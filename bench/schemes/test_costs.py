"""Position schemes in a model like GPT-tiny: training steps, their memory, and decoding.

Each is compared with ALiBi. A ratio over 1 means that the first one is slower or needs more memory.
Memory is that of a step beyond the parameters, with their gradients, in processes of their own.
"""

import pytest

from bench.common.growth import growth
from bench.common.measure import alternate, seconds
from bench.schemes.subjects import Decoding, Training

ROUNDS, PROCESSES = 7, 3
LENGTH, NEW = 1024, 64  # tokens of a sequence for training or a prompt, and those decoded
# Those of figure 3 of Veisi et al. (2025) and, for T5 against it, Sandwich.
SCHEMES = ("sinusoidal", "learned", "rotary", "kerple_log", "fire", "t5", "cable", "sandwich")


def compare(benchmark, record, what, scheme, reference, make) -> None:
    """Times make(scheme)() and make(reference)() in turn."""
    ours, others = make(scheme), make(reference)
    mine, theirs = alternate(benchmark, ours, seconds(others), ROUNDS)
    ratios = [m / t for m, t in zip(mine, theirs, strict=True)]
    work = f"{what}: {scheme} / {reference}"
    record(work, "float32", ratios, "x", None, None, mine, theirs)


def training(scheme: str) -> Training:
    return Training(scheme, LENGTH)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_training(benchmark, record, scheme):
    what = f"training step of {LENGTH} tokens"
    compare(benchmark, record, what, scheme, "alibi", training)


def test_training_with_t5_and_sandwich(benchmark, record):
    """Chi et al. (2023) report that T5 is 10 % slower."""
    what = f"training step of {LENGTH} tokens"
    compare(benchmark, record, what, "t5", "sandwich", training)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_decoding(benchmark, record, scheme):
    what = f"decoding of {NEW} tokens after {LENGTH}"
    compare(benchmark, record, what, scheme, "alibi", lambda s: Decoding(s, LENGTH, NEW))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_memory(record, scheme):
    pairs = [[growth(Training, x, LENGTH) for x in (scheme, "alibi")] for _ in range(PROCESSES)]
    work = f"peak memory of a training step: {scheme} / alibi"
    record(work, "float32", [ours / alibi for ours, alibi in pairs], "x", None, None)
