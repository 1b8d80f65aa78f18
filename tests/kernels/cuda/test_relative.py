"""Relative biases in the CUDA kernels: every rank, any number of distances, and planted faults."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cuda.backend import EMULATED, MARKS, attend, check
from tests.kernels.cuda.planted import EARLY, WRONG, Planted
from tests.support.biases import FreeFactors
from tests.support.cases import Case, pairwise
from tests.support.problems import Problem, drawn, evaluate

pytestmark = MARKS
HALF = {"dtype": torch.bfloat16, "dims": (64, 64)}

# A kernel is compiled for each padded rank, dtype and head_dim.
COMBINATIONS = pairwise(
    rank=[1, 3, 16, 20, 64],
    beyond=["zero", "last"],
    distances=[1, 2, 33, 150, 1000],
    lengths=[(17, 63), (63, 17), (130, 300), (260, 130)],
    dims=[(64, 64), (128, 128), (256, 256)],
    heads=[(4, 2), (1, 1)],
    causal=[True, False],
    window=[None, 70],
    dtype=[torch.bfloat16, torch.float16],
)


def relative(rank: int, beyond: str = "zero", distances: int | None = None, **settings) -> Problem:
    """A problem whose bias has vectors of queries, of which some distances have one."""
    problem = drawn(Case(**{"batch": 1} | settings))
    bias = FreeFactors(problem.case, of_queries=rank, beyond=beyond, distances=distances)
    problem.bias = bias.requires_grad_(problem.case.trained)
    return problem


@pytest.mark.parametrize("settings", COMBINATIONS, ids=lambda x: "-".join(map(str, x.values())))
def test_every_pair_of_settings_is_exact(settings):
    check(relative(**settings))


def test_factors_with_rows_that_cannot_be_loaded_in_chunks_are_copied():
    problem = relative(16, lengths=(70, 70), **HALF)
    factors = problem.bias.query_factors
    shifted = torch.cat([factors.detach().flatten()[:1], factors.detach().flatten()])[1:]
    problem.bias.query_factors = torch.nn.Parameter(shifted.view(factors.shape))
    check(problem)


def test_results_are_repeatable():
    problem = relative(16, distances=150, lengths=(200, 300), heads=(2, 1), **HALF)
    problem.bias.query_tables.requires_grad_(False)
    first, second = evaluate(problem, attend), evaluate(problem, attend)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("reason", "factors"),
    [
        ("has no kernels for vectors of keys", {"of_queries": 3, "of_keys": 5}),
        ("has no kernels for vectors of keys", {"of_keys": 16}),
        ("has no kernels for vectors of more than 64 channels", {"of_queries": 65}),
        ("has no gradients of the vectors of distances", {"of_queries": 3}),
    ],
)
def test_what_has_no_kernels_is_refused(reason, factors):
    problem = drawn(Case(lengths=(20, 20), **HALF))
    problem.bias = FreeFactors(problem.case, **factors)
    with pytest.raises(ValueError, match=f"^backend='cuda' {reason}"):
        attend(problem)


QUERIES, KEYS = (f"forms/relative_{x}.cuh" for x in ("queries", "keys"))
FORM = "forms/relative.cuh"
FAULTS = [
    Planted("rows are shifted by one too many", {WRONG}, QUERIES, "7 - lane / 4", "8 - lane / 4"),
    Planted(
        "rows are shifted as if the others were odd",
        {WRONG},
        QUERIES,
        "is_odd = shift % 2",
        "is_odd = lane / 4 % 2",
    ),
    Planted("columns are not exchanged", {WRONG}, QUERIES, "shear.exchange(products[n]);"),
    Planted(
        "no product is carried",
        {WRONG},
        QUERIES,
        "carries[e] = q < (shift + e) / 2",
        "carries[e] = false",
    ),
    Planted(
        "rows r + 8 have the distances of rows r",
        {WRONG},
        QUERIES,
        "products[m][2 + e], products[m + 1][2 + e]",
        "products[m + 1][2 + e], products[m + 2][2 + e]",
    ),
    Planted("a band ends too early", EARLY, FORM, "first + count > 0", "first > 0"),
    Planted(
        "a band begins too late",
        EARLY,
        FORM,
        "first < bias.columns",
        "first + count < bias.columns",
    ),
    Planted(
        "vectors beyond a band are not 0", {WRONG}, FORM, "n == nearest || bias.extends", "true"
    ),
    Planted("copies are not waited for", EARLY, FORM, "wait_copies();"),
    Planted(
        "tiles within a band have the multiplier of others",
        {WRONG},
        "logits.cuh",
        "has_bias ? kLog2E : scale_",
        "scale_",
    ),
]
FAULTS_OF_GRADIENTS = [
    Planted(
        "no pair is carried",
        {WRONG},
        QUERIES,
        "carries = q + shift / 2 >= 4",
        "carries = false",
    ),
    Planted(
        "odd rows have the vectors of even ones",
        {WRONG},
        QUERIES,
        "first + next, 8 * n",
        "first + unshear.offset, 8 * n",
    ),
    Planted(
        "vectors after the last one are read",
        EARLY,
        QUERIES,
        "row + 1 < kRows ? next : offset",
        "next",
    ),
    Planted(
        "the last distances have no gradient",
        {WRONG},
        QUERIES,
        "n < kKeys / 8 + 2; n += 2) {\n            uint32_t of_even",
        "n < kKeys / 8; n += 2) {\n            uint32_t of_even",
    ),
    Planted(
        "columns are shifted by one too many",
        {WRONG},
        KEYS,
        "(g + 7 - column)",
        "(g + 8 - column)",
    ),
    Planted(
        "no product of keys is carried",
        {WRONG},
        KEYS,
        "carries_[e] = g + column + 1 < 8",
        "carries_[e] = false",
    ),
    Planted("rows of keys begin too early", EARLY, KEYS, "(n + m + 1)", "(n + m + 2)"),
    Planted("all queries have the same vector", {WRONG}, FORM, "(exists ? n : 0)", "0"),
]


@pytest.mark.skipif(not EMULATED, reason="faults may hang a GPU")
@pytest.mark.parametrize("planted", FAULTS, ids=lambda x: x.name)
def test_fault_is_found(planted, first_fault):
    settings = {"heads": (1, 1), "trained": False, "causal": False}
    problem = relative(3, distances=151, lengths=(130, 400), **settings, **HALF)
    assert first_fault(planted, lambda: check(problem)) in planted.expected


@pytest.mark.skipif(not EMULATED, reason="faults may hang a GPU")
@pytest.mark.parametrize("planted", FAULTS_OF_GRADIENTS, ids=lambda x: x.name)
def test_fault_of_gradients_is_found(planted, first_fault):
    problem = relative(3, distances=151, lengths=(130, 200), heads=(1, 1), causal=False, **HALF)
    assert first_fault(planted, lambda: check(problem)) in planted.expected
