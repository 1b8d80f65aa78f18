"""The order in which a GPU computes the blocks of a problem with a plan: the longest first."""

from __future__ import annotations

import torch
from torch import Tensor

from .problem import Problem
from .shared_constants import PLAN_QUERIES


def for_queries(problem: Problem, block: int) -> Tensor:
    """Returns the numbers of the blocks of queries by decreasing work, (B H blocks,) int32.

    Block n of head h of sequence b has the number (b H + h) blocks + n.
    """
    plan, geometry = problem.plan, problem.geometry
    start = torch.arange(0, geometry.n_query, block, device=plan.device)
    n_query, n_key, shift = lengths(problem)
    shift = n_key - n_query + shift
    last = ((start + block).clamp(max=n_query) - 1).clamp(min=0).expand(*plan.shape[1:3], -1)
    first = plan[0][..., start // PLAN_QUERIES]
    end = plan[1].take_along_dim(last // PLAN_QUERIES, -1)
    if geometry.window is not None:
        first = torch.maximum(first, start + shift - geometry.window + 1)
    if geometry.causal:
        end = torch.minimum(end, (start + block).clamp(max=n_query) + shift)
    return longest_first((end - first).clamp(min=0).flatten(0, 1))


def for_keys(problem: Problem, block: int, reach: Tensor) -> Tensor:
    """Likewise for blocks of keys of each key head, whose work is that of all of its query heads.

    reach: that of the keys.
    """
    return longest_first(work_of_keys(problem, block, reach))


def in_turn_for_keys(problem: Problem, block: int, reach: Tensor) -> Tensor:
    """Like `for_keys`, but the blocks of a head start in their order: each as early as the longest
    of those that follow."""
    longest = work_of_keys(problem, block, reach).flip(1).cummax(1).values.flip(1)
    numbers = torch.arange(longest.numel(), device=longest.device).view_as(longest)
    return numbers.T.flatten()[longest_first(longest.T)].int()


def work_of_keys(problem: Problem, block: int, reach: Tensor) -> Tensor:
    """Returns the work of blocks of keys, (B key_heads, blocks)."""
    geometry = problem.geometry
    begin = torch.arange(0, geometry.n_key, block, device=reach.device)
    n_query, n_key, shift = lengths(problem)
    seen_from = begin - (n_key - n_query + shift) if geometry.causal else 0 * begin
    queries = (reach[1] - torch.maximum(reach[0], seen_from)).clamp(min=0)
    if geometry.window is not None:
        queries = queries.clamp(max=geometry.window + block)
    group = problem.q.shape[1] // problem.k.shape[1]
    return queries.unflatten(1, (-1, group)).sum(2).flatten(0, 1)


def reach_of_keys(problem: Problem, block: int) -> Tensor:
    """Returns the queries to which the plan leaves keys of each block: from the first one and up to
    the last one that attend to some of them, and to all of them, (4, B, H, blocks) int32."""
    first_key, end_key = problem.plan
    begin = torch.arange(0, problem.geometry.n_key, block, device=first_key.device)
    n_query, n_key, _ = lengths(problem)
    end = (begin + block).clamp(max=n_key)
    shape = *first_key.shape[:2], -1
    begin, end = (x.int().expand(shape).contiguous() for x in (begin, end))
    # A plan tile attends to a key if first_key <= key < end_key; both bounds are sorted.
    some_begin = torch.searchsorted(end_key, begin, right=True)
    some_end = torch.searchsorted(first_key, end)
    all_begin = torch.searchsorted(end_key, end)
    all_end = torch.searchsorted(first_key, begin, right=True)
    reach = torch.stack([some_begin, some_end, all_begin, all_end]) * PLAN_QUERIES
    return reach.clamp(max=n_query).int()


def longest_first(work: Tensor) -> Tensor:
    """Returns program numbers by decreasing work; work is (groups, blocks). int32"""
    return work.flatten().argsort(descending=True, stable=True).int()


def lengths(problem: Problem) -> tuple[int, int, int] | tuple[Tensor, ...]:
    """Returns n_query, n_key and shift: numbers, or tensors (B, 1, 1) if there are sequences."""
    if problem.sequences is None:
        return problem.geometry.n_query, problem.geometry.n_key, 0
    return tuple(problem.sequences.rows[:, column, None, None] for column in (1, 3, 4))
