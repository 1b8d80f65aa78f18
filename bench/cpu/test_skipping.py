"""Skipping: training time at the default tolerance, compared with computing every pair."""

import pytest
import torch

from bench.common.correctness import check, check_skipping
from bench.common.implementations import ours, sdpa_without_bias
from bench.common.layer import draw
from bench.common.measure import THREADS, alternate, seconds

# The factor of the length, the target of the speedup, and the number of rounds.
FASTER = {
    "alibi": [(4, 3.5, 5), (16, 11, 3)],
    "type2": [(4, 10, 5)],
}


@pytest.mark.parametrize(
    ("bias", "times", "target", "rounds"),
    [(bias, *case) for bias, cases in FASTER.items() for case in cases],
)
def test_faster_than_everything(benchmark, record, length, bias, times, target, rounds):
    check(bias, torch.float32)
    check_skipping(bias, torch.float32)
    inputs = draw(times * length, torch.float32)
    whole = seconds(ours(inputs, bias, tolerance=0.0))
    mine, theirs = alternate(benchmark, ours(inputs, bias), whole, rounds)
    ratios = [t / m for m, t in zip(mine, theirs, strict=True)]
    work = f"{bias} against itself at tolerance 0, N = {times * length}"
    record(work, "float32", ratios, "x", ">=", target, mine, theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bias", ["kerple_log", "inverse_distance"])
def test_cost_where_nothing_can_be_skipped(benchmark, record, length, bias, dtype):
    torch_dtype = getattr(torch, dtype)
    check(bias, torch_dtype)
    inputs = draw(length, torch_dtype)
    whole = seconds(ours(inputs, bias, tolerance=0.0))
    mine, theirs = alternate(benchmark, ours(inputs, bias), whole, 31)
    ratios = [m / t for m, t in zip(mine, theirs, strict=True)]
    work = f"{bias}, without negligible keys, against itself at tolerance 0"
    record(work, dtype, ratios, "x", "<=", 1.02, mine, theirs)


def test_long_sequence_against_sdpa(benchmark, record, length):
    """SDPA's time grows with the square of the length: it is measured at a quarter of it."""
    check("alibi", torch.float32)
    check_skipping("alibi", torch.float32)
    quarter = seconds(sdpa_without_bias(draw(4 * length, torch.float32), "alibi"))
    long = ours(draw(16 * length, torch.float32), "alibi")
    mine, theirs = alternate(benchmark, long, lambda: 16 * quarter(), 3)
    ratios = [t / m for m, t in zip(mine, theirs, strict=True)]
    work = f"alibi at N = {16 * length} against 16 times SDPA without bias at N = {4 * length}"
    record(work, "float32", ratios, "x", ">=", 15, mine, theirs)


def test_threads_balance_heads_of_unequal_cost(benchmark, record, length):
    inputs = draw(4 * length, torch.float32)

    def alone() -> float:
        torch.set_num_threads(1)
        try:
            return seconds(ours(inputs, "alibi"))()
        finally:
            torch.set_num_threads(THREADS)

    mine, theirs = alternate(benchmark, ours(inputs, "alibi"), alone, 5)
    ratios = [t / m for m, t in zip(mine, theirs, strict=True)]
    work = f"alibi on {THREADS} threads against one, N = {4 * length}"
    record(work, "float32", ratios, "x", ">=", 1.8, mine, theirs)
