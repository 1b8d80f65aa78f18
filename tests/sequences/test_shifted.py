"""Sequences whose queries are beyond their keys."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from biased_flash_attn import backends, biases
from biased_flash_attn.attention import attend, prepared
from biased_flash_attn.operators import planned
from biased_flash_attn.sequences import Sequences
from tests.sequences.shifted_cases import ShiftedCase, drawn_shifted, shifted
from tests.support.biases import FORMS
from tests.support.cases import DTYPES, INSTRUCTION_SETS, pairwise
from tests.support.plans import random_plan
from tests.support.problems import check_problem, evaluate

# Some are larger than the number of keys, or so large that no query sees a key in its window.
SHIFTS = [(0, 1), (17, 3), (1, 200), (90, 150)]
COMBINATIONS = pairwise(
    bias=list(FORMS),
    dtype=DTYPES,
    lengths=[(70, 70), (17, 63), (65, 5), (130, 131)],
    shifts=SHIFTS,
    dims=[(16, 16), (40, 8)],
    heads=[(1, 1), (4, 2)],
    causal=[True, False],
    window=[None, 1, 20, 500],
    layout=["contiguous", "heads_inside"],
    instruction_set=INSTRUCTION_SETS,
)


@pytest.mark.parametrize(
    ("instruction_set", "case"),
    [(row.pop("instruction_set"), ShiftedCase(**row)) for row in COMBINATIONS],
    ids=str,
)
def test_every_pair_of_settings_is_exact(instruction_set, case):
    with backends.instruction_set(instruction_set):
        check_problem(drawn_shifted(case), shifted)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("shifts", SHIFTS, ids=str)
@pytest.mark.parametrize("bias", FORMS)
def test_the_reference_is_exact(bias, shifts, causal):
    case = ShiftedCase(bias, lengths=(17, 23), shifts=shifts, window=40, causal=causal)
    check_problem(drawn_shifted(case), functools.partial(shifted, backend="reference"))


@pytest.mark.parametrize("bias", FORMS)
def test_queries_beyond_their_windows_are_empty(bias):
    case = ShiftedCase(bias, lengths=(33, 33), shifts=(40, 52), window=8)
    results = evaluate(drawn_shifted(case), shifted)
    assert (results.pop("lse") == -torch.inf).all()
    for name, x in results.items():
        assert (x == 0).all(), name


@pytest.mark.parametrize("bias", ["none", "linear", "distance"])
def test_packed_sequences_equal_separate_calls(bias):
    lengths, shifts = ((40, 40), (17, 30), (0, 3), (65, 9)), torch.tensor([3, 0, 4, 80])
    totals = tuple(map(sum, zip(*lengths, strict=True)))
    problem = drawn_shifted(ShiftedCase(bias, lengths=totals, batch=1, shifts=(80,)))
    offsets = [torch.tensor(side).cumsum(0).int() for side in zip((0, 0), *lengths, strict=True)]
    sequences = Sequences.from_offsets(*offsets, totals, (None, None)).shifted(shifts)
    leaves = (problem.q, problem.k, problem.v)

    def attended(q, k, v, sequences):
        options = (True, 50, None, None, "cpu")
        return attend(prepared(q, k, v, problem.bias, *options, sequences=sequences))

    results = attended(*leaves, sequences)
    cotangents = (problem.grad_o, problem.grad_lse)
    gradients = torch.autograd.grad(results, leaves, cotangents)
    i = j = 0
    for (n_query, n_key), shift in zip(lengths, shifts, strict=True):
        rows = [slice(i, i + n_query), slice(j, j + n_key), slice(j, j + n_key)]
        own = [x[:, :, at].detach().requires_grad_() for x, at in zip(leaves, rows, strict=True)]
        alone = attended(*own, Sequences.from_entries(1, n_query, n_key).shifted(shift))
        own_cotangents = tuple(x[:, :, rows[0]] for x in cotangents)
        own_gradients = torch.autograd.grad(alone, own, own_cotangents)
        for whole, one in zip(results, alone, strict=True):
            assert torch.equal(whole[:, :, rows[0]], one)
        for whole, at, one in zip(gradients, rows, own_gradients, strict=True):
            assert torch.equal(whole[:, :, at], one)
        i, j = i + n_query, j + n_key


@pytest.mark.sanitize
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("bias", FORMS)
def test_plans_are_followed(bias, causal):
    case = ShiftedCase(bias, lengths=(300, 200), shifts=(260, 20), heads=(2, 1), causal=causal)
    case = replace(case, plan=random_plan(case))
    check_problem(drawn_shifted(case), shifted)


def test_certified_plans_do_not_skip_their_keys():
    """Bounds need the lse of the nearest keys, which these queries do not have."""
    q, k, v = torch.randn(3, 2, 1, 1100, 8)
    sequences = Sequences.from_entries(2, 1100, 1100).shifted(torch.tensor([0, 5]))
    options = (biases.Type2(1), True, None, None, 0.01, "cpu")
    first_key, end_key = planned(prepared(q, k, v, *options, sequences=sequences)).plan
    assert (first_key[0] > 0).any()
    assert (first_key[1] == 0).all()
    assert (end_key[1] == 1100).all()


def test_errors_name_the_argument():
    entries = Sequences.from_entries(2, 5, 5)
    with pytest.raises(ValueError, match="shift is -1; it must be 0 or more"):
        entries.shifted(torch.tensor([3, -1]))
    q, k, v = torch.randn(3, 2, 1, 5, 4)
    options = (True, None, None, None, "cpu")
    steps = torch.randn(2, 1, 5)
    with pytest.raises(ValueError, match="steps has length 5; it must be the number of keys, 8"):
        prepared(q, k, v, biases.CumulativeBias(steps), *options, sequences=entries.shifted(3))
    longer = biases.CumulativeBias(torch.randn(2, 1, 8), torch.randn(2, 1, 8))
    with pytest.raises(ValueError, match="gain has length 8; it must be the number of queries, 5"):
        prepared(q, k, v, longer, *options, sequences=entries.shifted(3))
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    packed = Sequences.from_offsets(offsets, offsets, (5, 5), (5, 5)).shifted(3)
    one = biases.CumulativeBias(torch.randn(1, 1, 5))
    with pytest.raises(ValueError, match="no steps for queries beyond their keys"):
        prepared(q[:1], k[:1], v[:1], one, *options, sequences=packed)
