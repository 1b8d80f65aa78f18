"""All gradients in one pass, in which blocks of keys add to those of queries in turn."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from biased_flash_attn.cuda_kernels.backward import Pass
from tests.kernels.cuda.backend import MARKS, attend, check
from tests.sequences.packed_cases import (
    PackedCase,
    PaddedCase,
    drawn_packed,
    drawn_padded,
    packed,
    padded,
)
from tests.support.cases import Case, pairwise
from tests.support.plans import PlannedCase, planned, random_plan
from tests.support.problems import check_beyond_float32, drawn

BIASES = ("none", "linear", "distance", "cumulative", "cumulative-gain")
OF_EVERY_BIAS = pytest.mark.parametrize("bias", BIASES)
DIMS = [(64, 64), (40, 40), (128, 128), (128, 64), (64, 128), (96, 96)]
# Keys of narrow heads are kept in registers.
OF_BOTH_WIDTHS = pytest.mark.parametrize("dims", [(64, 64), (128, 64)], ids=str)

pytestmark = [*MARKS, pytest.mark.usefixtures("one_pass")]


@pytest.fixture
def one_pass(monkeypatch):
    """Checks that the kernel for all gradients computes them."""
    compute, calls = Pass.all_gradients, []

    def counted(call: Pass) -> None:
        calls.append(call)
        compute(call)

    def refused(call: Pass) -> None:
        pytest.fail("two passes compute the gradients")

    monkeypatch.setattr(Pass, "all_gradients", counted)
    monkeypatch.setattr(Pass, "queries_and_keys", refused)
    yield
    assert calls


# With several blocks of keys, and several tiles of queries.
COMBINATIONS = pairwise(
    bias=list(BIASES),
    dtype=[torch.bfloat16, torch.float16],
    lengths=[(280, 280), (90, 330), (290, 150)],
    dims=DIMS,
    heads=[(2, 1), (1, 1)],
    window=[None, 70, 200],
    trained=[True, False],
)


@pytest.mark.parametrize("case", [Case(**row, batch=1) for row in COMBINATIONS], ids=str)
def test_every_pair_of_settings_is_exact(case):
    check(case)


@OF_BOTH_WIDTHS
@OF_EVERY_BIAS
def test_queries_without_keys_have_no_gradients(bias, dims):
    problem = drawn(Case(bias, torch.float16, (300, 100), dims, (2, 1), batch=1))
    ours = check(problem)
    assert (ours["gradient of q"][:, :, :200] == 0).all()
    if "gradient of gain" in ours:
        assert (ours["gradient of gain"][..., :200] == 0).all()


@OF_BOTH_WIDTHS
@pytest.mark.parametrize("bias", ["none", "linear", "distance"])
def test_queries_of_no_keys_in_a_window_have_no_gradients(bias, dims):
    """Of 300 queries, the last 100 are at positions of keys."""
    case = Case(bias, torch.bfloat16, (300, 100), dims, (2, 1), batch=1, causal=False, window=20)
    ours = check(case)
    assert (ours["gradient of q"][:, :, 200:] != 0).any()


@OF_BOTH_WIDTHS
@OF_EVERY_BIAS
def test_keys_without_queries_have_no_gradients(bias, dims):
    case = Case(bias, torch.float16, (60, 430), dims, (2, 1), batch=1, window=50)
    ours = check(case)
    unseen = 430 - 60 - 49
    for name in ("k", "v"):
        assert (ours[f"gradient of {name}"][:, :, :unseen] == 0).all()


@OF_BOTH_WIDTHS
@OF_EVERY_BIAS
def test_packed_sequences_of_very_different_lengths_are_exact(bias, dims):
    """None ends with a tile, and some are without queries or keys."""
    lengths = [(140, 260), (1, 1), (0, 130), (70, 70), (9, 0), (150, 20)]
    random.shuffle(lengths)
    settings = {"bias": bias, "dtype": torch.bfloat16, "dims": dims, "heads": (2, 1)}
    problem = drawn_packed(PackedCase.of(tuple(lengths), **settings))
    check(problem, functools.partial(packed, backend="cuda"))


@OF_BOTH_WIDTHS
@OF_EVERY_BIAS
def test_padding_on_both_sides_is_exact(bias, dims):
    """Sequences begin in the first tile, and in a later one."""
    padding = ((3, 100), (135, 2))
    settings = {"bias": bias, "dtype": torch.float16, "dims": dims, "heads": (2, 1)}
    problem = drawn_padded(PaddedCase(lengths=(290, 290), padding=padding, **settings))
    check(problem, functools.partial(padded, backend="cuda"))


@OF_BOTH_WIDTHS
@pytest.mark.parametrize("window", [None, 150])
@OF_EVERY_BIAS
def test_plans_are_exact(bias, window, dims):
    case = Case(bias, torch.bfloat16, (290, 330), dims, (2, 1), batch=1, window=window)
    problem = drawn(case)
    problem.case = PlannedCase(**vars(case), plan=random_plan(case, some_empty=False))
    check(problem, functools.partial(planned, backend="cuda"))


@OF_BOTH_WIDTHS
@pytest.mark.parametrize("bias", ["linear", "cumulative-gain"])
def test_plans_of_queries_without_keys_are_exact(bias, dims):
    """Tiles of queries get their first sums from some block of keys, or from none."""
    n = 500
    case = Case(bias, torch.float16, (n, n), dims, (2, 1), batch=1)
    first = torch.tensor([[0, 128, 256, 500], [0, 0, 200, 400]])
    end = torch.tensor([[128, 256, 256, 500], [0, 200, 300, 500]])
    problem = drawn(case)
    problem.case = PlannedCase(**vars(case), plan=torch.stack([first, end])[:, None].int())
    ours = check(problem, functools.partial(planned, backend="cuda"))
    assert (ours["gradient of q"][:, 0, 256:] == 0).all()
    assert (ours["gradient of q"][:, 1, :128] == 0).all()


@OF_BOTH_WIDTHS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_large_gains_of_large_sums_are_exact(dtype, dims):
    """Sums are split into parts of the dtype, where products of dS and gains might overflow."""
    problem = drawn(Case("cumulative-gain", dtype, (140, 300), dims, (2, 1), batch=1))
    with torch.no_grad():
        problem.bias.steps *= 1e-5
        problem.bias.gain.abs_().mul_(1e5)
        problem.bias.steps[..., 0] = 1e3
        problem.bias.steps[..., 140] = -1e6
        problem.bias.gain[..., ::7] *= 1e-9
    check_beyond_float32(problem, attend)
