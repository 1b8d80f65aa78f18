"""Attention over several ranks equals that of one process, forward and backward."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

from tests.distributed.pairs_of_settings import cases_of
from tests.distributed.ranks import outcomes

MODULE = "tests.distributed.cases"


@pytest.fixture(scope="module")
def results_of(request, tmp_path_factory):
    """Returns a function from the number of ranks to the results of each."""

    @cache
    def of_ranks(ranks: int) -> list[dict]:
        directory, seed = tmp_path_factory.mktemp("ranks"), request.config.option.seed
        results, errors = outcomes(ranks, directory, MODULE, "everything", seed)
        assert None not in results, errors
        return results

    return of_ranks


CASES = [
    *(pytest.param(2, case, id=f"2-{case}") for case in cases_of(2)),
    *(pytest.param(4, case, id=f"4-{case}", marks=pytest.mark.slow) for case in cases_of(4)),
]


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_every_pair_of_settings_is_exact(results_of, ranks, case):
    for of_rank in results_of(ranks):
        assert of_rank["exact"][str(case)] == ""


@pytest.mark.parametrize("what", ["exact", "tolerance", "needle", "infinity"])
def test_skipped_keys_are_negligible(results_of, what):
    for of_rank in results_of(2):
        assert of_rank["skipped"][what]
        assert of_rank["skipped"][what] == [""] * len(of_rank["skipped"][what])


def test_invalid_calls_raise_on_all_ranks(results_of):
    expected = (
        "ValueError: x has 2 rows in dimension 2; on 2 ranks .* a multiple of 4",
        "ValueError: q has 7 rows and k has 7; both must be the same even number",
        "RefusedError: backend='reference' does not compute context parallelism; it may be",
        "TypeError: traffic is a int; it must be None or a Traffic",
        "ValueError: rank [01] called context_parallel_attention with another scale .* the same",
        "ValueError: steps has length 16; it must be the number of keys, 8",
        "ValueError: rank [01] called .* another form of bias, .* the same",
        "ValueError: rank [01] called .* another form of bias, .* than rank [01]; .* the same",
        r"TypeError: group is a DeviceMesh; pass mesh.get_group\(\)",
        "ValueError: n_local is 7; it must be even",
        r"ValueError: x.shape\[0\] is 3; it must be even",
    )
    for of_rank in results_of(2):
        for one, pattern in zip(of_rank["layouts"], expected, strict=True):
            assert re.match(pattern, one), one


def test_sums_before_large_steps_are_exact(results_of):
    for of_rank in results_of(2):
        assert of_rank["sums_of_large_steps"] == [0, 0]


def test_weights_of_a_large_bias_sum_to_1(results_of):
    for of_rank in results_of(2):
        assert of_rank["weights_of_a_large_bias"] < 2**-20


def test_compilation_and_second_calls_do_not_change_results(results_of):
    for of_rank in results_of(2):
        assert of_rank["repeated_calls"]["differences"] == [0, 0]
        assert "no second derivatives" in of_rank["repeated_calls"]["error"]


def test_custom_biases_are_exact(results_of):
    for of_rank in results_of(2):
        assert of_rank["custom_biases"] == []


def test_traffic_is_counted(results_of):
    """Under a causal mask two ranks exchange three of four chunks, in both passes."""
    chunk, kv_heads, dim, heads = 32, 2, 4, 4
    keys, sums = 3 * 4 * chunk * kv_heads * dim, 3 * 8 * chunk * heads
    for of_rank in results_of(2):
        assert of_rank["counted"] == [2 * keys, 2 * keys, 2 * sums, 2 * keys + sums]


def test_autocast_casts_only_the_inputs(results_of):
    for of_rank in results_of(2):
        assert of_rank["autocast"] == [True, True]


@pytest.mark.slow
def test_ranks_with_negligible_keys_send_none(results_of):
    """Chunk c needs chunk c - 1, which belongs to rank r - 1, r + 1 or r."""
    assert [of_rank["dropped"] for of_rank in results_of(4)] == [[1, 2], [2, 1], [2, 1], [1, 2]]


@pytest.mark.slow
def test_heads_may_be_distributed_too(results_of):
    """On a mesh of two by two ranks: slopes are those of all heads, not of a rank's number."""
    for of_rank in results_of(4):
        assert max(of_rank["with_tensor_parallelism"]) < 1e-6


def test_training_with_fsdp_equals_one_process(results_of):
    for of_rank in results_of(2):
        assert max(of_rank["with_fsdp"]) < 1e-5


@pytest.mark.parametrize("function", ["lost", "lost_in_transfer"])
def test_a_lost_rank_raises_on_the_others(tmp_path, function):
    (message, killed), _ = outcomes(2, tmp_path, MODULE, function, "0")
    assert killed is None
    assert "a peer was lost while rank 0" in message
    assert "restart all ranks from a checkpoint" in message
    if function == "lost_in_transfer":
        assert "in hop 1 of 1, to 1 from 1" in message
    # An error of the connection, and not of a rank that waited for its timeout.
    _, reported = message.split("The transport reported: ")
    assert re.search("Connection (closed|reset) by peer|Broken pipe", reported)


def test_error_without_a_process_group_names_the_remedy():
    from biased_flash_attn.distributed import context_parallel_attention

    q, k, v = torch.randn(3, 1, 1, 4, 4)
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group"):
        context_parallel_attention(q, k, v)
