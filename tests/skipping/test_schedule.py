"""The order in which blocks start."""

from __future__ import annotations

import itertools

import pytest
import torch

from biased_flash_attn import schedule
from biased_flash_attn.forms import Geometry, NoBias
from biased_flash_attn.problem import Problem
from tests.support.cases import Case
from tests.support.plans import random_plan

BLOCK = 128
LENGTHS = [(1000, 1000), (300, 1500), (1500, 300), (100, 100)]


def planned_call(case: Case) -> Problem:
    heads, kv_heads = case.heads
    q = torch.zeros(case.batch, heads, case.lengths[0], 8, dtype=torch.float16)
    k = torch.zeros(case.batch, kv_heads, case.lengths[1], 8, dtype=torch.float16)
    geometry = Geometry(*case.lengths, case.causal, case.window)
    return Problem(q, k, k, NoBias(), geometry, 1.0, 0.0, "cuda", random_plan(case))


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_blocks_of_keys_start_in_turn(lengths, causal, window):
    """A block waits for those before it in its head. Otherwise, the longest of those that have to
    wait for a block determines when it starts."""
    case = Case(lengths=lengths, heads=(6, 3), causal=causal, window=window)
    call = planned_call(case)
    reach = schedule.reach_of_keys(call, BLOCK)
    work = schedule.work_of_keys(call, BLOCK, reach).tolist()
    order = schedule.in_turn_for_keys(call, BLOCK, reach)
    assert order.dtype == torch.int32
    blocks = -(-lengths[1] // BLOCK)
    started = [divmod(number, blocks) for number in order.tolist()]
    every = itertools.product(range(case.batch * case.heads[1]), range(blocks))
    assert sorted(started) == list(every)
    for group in range(len(work)):
        of_group = [block for other, block in started if other == group]
        assert of_group == list(range(blocks))
    longest = [max(work[group][block:]) for group, block in started]
    assert longest == sorted(longest, reverse=True)


def test_the_first_block_starts_as_early_as_the_longest_that_follows():
    """Head 1 has more work than head 0, but less than the last block of head 0."""
    case = Case(lengths=(4 * BLOCK, 2 * BLOCK), heads=(2, 2), batch=1, causal=False)
    call = planned_call(case)
    first = BLOCK * torch.tensor([[0, 1, 1, 1], [0, 0, 0, 2]])
    call.plan.copy_(torch.stack([first, torch.full_like(first, 2 * BLOCK)])[:, None])
    reach = schedule.reach_of_keys(call, BLOCK)
    tiles = schedule.work_of_keys(call, BLOCK, reach) // BLOCK
    assert tiles.tolist() == [[1, 4], [3, 3]]
    assert schedule.in_turn_for_keys(call, BLOCK, reach).tolist() == [0, 1, 2, 3]
    assert schedule.for_keys(call, BLOCK, reach).tolist() == [1, 2, 3, 0]
