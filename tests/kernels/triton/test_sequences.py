"""Packed sequences and padded batches on the Triton kernels."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest
import torch

from biased_flash_attn.operators import planned
from biased_flash_attn.sequences import Sequences
from tests.kernels.triton.backend import EMULATED, MARKS
from tests.sequences.packed_cases import (
    PackedCase,
    PaddedCase,
    drawn_packed,
    drawn_padded,
    packed,
    padded,
)
from tests.sequences.shifted_cases import ShiftedCase, drawn_shifted, shifted
from tests.support.biases import FORMS
from tests.support.cases import Case, pairwise
from tests.support.plans import random_plan
from tests.support.problems import check_problem, evaluate, prepared_call

pytestmark = MARKS
attend_packed = functools.partial(packed, backend="triton")
attend_padded = functools.partial(padded, backend="triton")
attend_shifted = functools.partial(shifted, backend="triton")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The parameters for which Triton compiles different kernels. Lengths are drawn.
COMBINATIONS = pairwise(
    kind=["packed", "padded", "shifted"],
    bias=list(FORMS),
    dtype=DTYPES,
    dims=[(16, 16), (19, 80)],
    heads=[(4, 2)],
    causal=[True, False],
    window=[None, 20],
    trained=[True, False],
)
PACKED = [
    ((1, 1), (17, 17), (0, 0), (63, 63)),
    ((5, 30), (0, 7), (9, 0), (30, 5), (40, 65)),
    ((33, 33), (70, 70)),
]
PADDED = [((0, 3), (9, 0)), ((4, 5), (0, 0)), ((0, 20), (50, 0))]
SHIFTED_LENGTHS = [(50, 50), (70, 33), (1, 40)]
SHIFTS = [(0, 1), (17, 64), (33, 90)]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(row.pop("kind"), row) for row in COMBINATIONS],
    ids=lambda x: x if isinstance(x, str) else str(Case(**x)),
)
def test_every_pair_of_settings_is_exact(kind, settings):
    if kind == "packed":
        case = PackedCase.of(random.choice(PACKED), **settings)
        make, attend = drawn_packed, attend_packed
    elif kind == "padded":
        # Without a causal mask, a padded batch has as many queries as keys.
        n_query = random.choice([20, 50]) if settings["causal"] else 50
        case = PaddedCase(lengths=(n_query, 50), padding=random.choice(PADDED), **settings)
        make, attend = drawn_padded, attend_padded
    else:
        lengths, shifts = random.choice(SHIFTED_LENGTHS), random.choice(SHIFTS)
        case = ShiftedCase(lengths=lengths, shifts=shifts, **settings)
        make, attend = drawn_shifted, attend_shifted
    print(case)
    check_problem(make(case), attend)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("bias", ["linear", "distance", "cumulative-gain"])
def test_plans_of_shifted_sequences_are_followed(bias, causal):
    settings = {"lengths": (140, 60), "shifts": (100, 30), "heads": (2, 1), "causal": causal}
    case = ShiftedCase(bias, torch.float16, **settings)
    case = replace(case, plan=random_plan(case, some_empty=False))
    check_problem(drawn_shifted(case), attend_shifted)


@pytest.mark.skipif(EMULATED, reason="too slow to emulate")
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", FORMS)
def test_sequences_of_realistic_sizes_are_exact(bias, dtype, dims):
    lengths = ((1000, 1000), (37, 37), (300, 900), (0, 0), (513, 513))
    settings = {"bias": bias, "dtype": dtype, "dims": dims, "heads": (4, 2)}
    for trained in (True, False):
        case = PackedCase.of(lengths, **settings, trained=trained)
        check_problem(drawn_packed(case), attend_packed)
    case = PaddedCase(lengths=(700, 700), padding=((0, 300), (500, 3)), **settings)
    check_problem(drawn_padded(case), attend_padded)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
def test_diagonal_sums_are_chunked_by_sequence(monkeypatch, causal):
    case = PackedCase.of(((40, 40), (5, 9), (33, 20), (1, 1)), bias="distance", causal=causal)
    whole = evaluate(drawn_packed(case), attend_packed)
    assert whole["gradient of r"].abs().max() > 0
    problem = drawn_packed(case)
    monkeypatch.setattr("biased_flash_attn.triton_kernels.launch.diagonals._SUMS", 1)
    check_problem(problem, attend_packed)


@pytest.mark.parametrize(("bias", "causal"), [("type2", True), ("cumulative", False)])
def test_plans_of_sequences_are_followed(bias, causal):
    """Also by gradients. Sequences too short for a plan use all keys."""
    case = PackedCase.of(
        ((40, 40), (1030, 1030), (0, 0)),
        bias=bias,
        dtype=torch.float16,
        heads=(1, 1),
        causal=causal,
    )
    problem = drawn_packed(case)
    with torch.no_grad():
        if bias == "cumulative":
            problem.bias.steps.fill_(-0.3)
    sequences = Sequences.from_offsets(*case.offsets(), case.lengths, (None, None))
    call = prepared_call(problem, "triton", sequences=sequences)
    plan = planned(call).plan
    assert (plan[0, 0, :, :1] == 0).all()
    assert (plan[0, 1] > 0).any()
    ours = evaluate(problem, attend_packed)
    exact = evaluate(problem, functools.partial(packed, backend="reference"))
    for name, x in exact.items():
        error = (ours[name].double() - x.double()).norm() / x.double().norm()
        assert error <= 2e-3, name
