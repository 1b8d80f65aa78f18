"""The CUDA kernels against float64, on a Hopper GPU or, without a GPU, in the emulator."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from biased_flash_attn.cuda_kernels.backward import Pass
from tests.kernels.cuda.backend import EMULATED, FORMS, MARKS, attend, check
from tests.sequences.packed_cases import (
    PackedCase,
    PaddedCase,
    drawn_packed,
    drawn_padded,
    packed,
    padded,
)
from tests.sequences.shifted_cases import ShiftedCase, drawn_shifted, shifted
from tests.support.cases import LAYOUTS, Case, pairwise
from tests.support.problems import drawn, evaluate

pytestmark = MARKS
DTYPES = [torch.bfloat16, torch.float16]

# Kernels are compiled for a form, a dtype and padded dims; the rest are parameters.
COMBINATIONS = pairwise(
    bias=list(FORMS),
    dtype=DTYPES,
    lengths=[(17, 63), (63, 17), (130, 300), (260, 260)],
    dims=[(64, 64), (128, 128), (72, 8), (192, 128), (24, 200), (256, 256)],
    heads=[(4, 2), (1, 1)],
    causal=[True, False],
    window=[None, 5, 150],
    trained=[True, False],
)


@pytest.mark.parametrize("case", [Case(**row, batch=1) for row in COMBINATIONS], ids=str)
def test_every_pair_of_settings_is_exact(case):
    check(case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", [(64, 64), (40, 24)], ids=str)
def test_every_layout_is_exact(layout, dims):
    """Also those that no tensor map can describe, which are copied."""
    check(Case("linear", torch.float16, (35, 150), dims, heads=(4, 2), layout=layout))


@pytest.mark.skipif(EMULATED, reason="too slow to emulate")
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (96, 80)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", FORMS)
def test_every_form_is_exact_at_realistic_sizes(bias, dtype, dims):
    for trained in (True, False):
        check(Case(bias, dtype, (2000, 2000), dims, heads=(4, 2), trained=trained))
    case = Case(bias, dtype, (700, 1500), dims, heads=(4, 2), causal=False, window=400)
    check(case)


PACKED = [
    ((1, 1), (17, 17), (0, 0), (163, 163)),
    ((5, 30), (0, 7), (9, 0), (30, 5), (140, 165)),
]
PADDED = [((0, 3), (9, 0)), ((0, 120), (150, 0))]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("bias", FORMS)
@pytest.mark.parametrize("kind", ["packed", "padded", "shifted"])
def test_sequences_of_different_lengths_are_exact(kind, bias, causal):
    settings = {"bias": bias, "dtype": torch.bfloat16, "dims": (64, 64), "heads": (4, 2)}
    settings |= {"causal": causal, "window": random.choice([None, 50])}
    if kind == "packed":
        problem = drawn_packed(PackedCase.of(random.choice(PACKED), **settings))
        call = packed
    elif kind == "padded":
        case = PaddedCase(lengths=(190, 190), padding=random.choice(PADDED), **settings)
        problem, call = drawn_padded(case), padded
    else:
        problem = drawn_shifted(ShiftedCase(lengths=(140, 60), shifts=(100, 30), **settings))
        call = shifted
    print(problem.case)
    check(problem, functools.partial(call, backend="cuda"))


def test_short_sequences_take_two_passes(monkeypatch):
    """In one pass, each would have sums of dq for a tile of 64 queries."""
    monkeypatch.setattr(Pass, "all_gradients", lambda _: pytest.fail("one pass"))
    settings = {"dtype": torch.float16, "dims": (64, 64), "heads": (2, 1)}
    problem = drawn_packed(PackedCase.of(((3, 5),) * 30, bias="linear", **settings))
    check(problem, functools.partial(packed, backend="cuda"))


@pytest.mark.parametrize("bias", ["linear", "distance"])
def test_results_are_repeatable(bias):
    problem = drawn(Case(bias, torch.bfloat16, (300, 300), (64, 64), (4, 2)))
    first, second = evaluate(problem, attend), evaluate(problem, attend)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-10])
def test_scales_that_cannot_divide_a_bias_are_refused(scale):
    problem = drawn(Case("linear", torch.bfloat16, (20, 20), (64, 64), scale=scale))
    with pytest.raises(ValueError, match=r"^backend='cuda' needs a scale of at least 1e-09; it is"):
        attend(problem)


@pytest.mark.parametrize("scale", [1e-9, 20.0])
@pytest.mark.parametrize("bias", ["none", "linear", "distance", "cumulative-gain"])
def test_any_other_scale_is_exact(bias, scale):
    check(Case(bias, torch.float16, (40, 150), (64, 64), scale=scale))


def test_compiled_calls_have_no_graph_break():
    problem = drawn(Case("linear", torch.bfloat16, (70, 70), (64, 64)))
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    expected, found = evaluate(problem, attend), evaluate(problem, compiled)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
