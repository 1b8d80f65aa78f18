"""Converts plans to the layouts of the kernels, and orders programs by decreasing work."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import problem as calls
from ...shared_constants import PLAN_QUERIES
from .. import operands
from ..operands import Plan, PlanOfKeys, Rows, rows


def of_entries(plan: Plan | None, entries: slice) -> Plan | None:
    """Selects the key ranges of some batch entries; `order` is left unchanged."""
    if plan is None:
        return None
    return Plan(operands.of_entries(plan.keys, entries), plan.order)


def of_queries(problem: calls.Problem, block: int) -> Plan | None:
    """Returns the plan for a kernel with one program per block of queries, or None without a
    plan."""
    plan, geometry = problem.plan, problem.geometry
    if plan is None:
        return None
    start = torch.arange(0, geometry.n_query, block, device=plan.device)
    n_query, n_key, shift = _lengths(problem)
    shift = n_key - n_query + shift
    first, end = plan[..., start // PLAN_QUERIES]
    if geometry.window is not None:
        first = torch.maximum(first, start + shift - geometry.window + 1)
    if geometry.causal:
        end = torch.minimum(end, (start + block).clamp(max=n_query) + shift)
    return Plan(_interleaved(plan), _longest_first((end - first).clamp(min=0).flatten(0, 1)))


def combine_cuts(cut: Tensor, block: int, from_end: bool) -> Tensor:
    """Combines the cuts of the blocks of a plan tile into one that removes only keys that every
    block removes: (B, H, blocks) to (B, H, tiles)."""
    per_tile = PLAN_QUERIES // block
    far = torch.iinfo(cut.dtype).min if from_end else torch.iinfo(cut.dtype).max
    padded = torch.nn.functional.pad(cut, (0, -cut.shape[2] % per_tile), value=far)
    of_blocks = padded.unflatten(2, (-1, per_tile))
    return of_blocks.amax(-1) if from_end else of_blocks.amin(-1)


def of_keys(problem: calls.Problem, block: int) -> PlanOfKeys | None:
    """Returns the plan for a kernel with one program per block of keys of each key head."""
    plan, geometry = problem.plan, problem.geometry
    if plan is None:
        return None
    first_key, end_key = plan
    begin = torch.arange(0, geometry.n_key, block, device=plan.device, dtype=torch.int32)
    n_query, n_key, shift = _lengths(problem)
    end = (begin + block).clamp(max=n_key).int()
    begin, end = (x.expand(*plan.shape[1:3], -1).contiguous() for x in (begin, end))
    # A plan tile attends to a key if first_key <= key < end_key; both bounds are sorted.
    some_begin = torch.searchsorted(end_key, begin, right=True)
    some_end = torch.searchsorted(first_key, end)
    all_begin = torch.searchsorted(end_key, end)
    all_end = torch.searchsorted(first_key, begin, right=True)
    reach = torch.stack([some_begin, some_end, all_begin, all_end]) * PLAN_QUERIES
    reach = reach.clamp(max=n_query).int()
    seen_from = begin - (n_key - n_query + shift) if geometry.causal else 0 * begin
    queries = (reach[1] - torch.maximum(reach[0], seen_from)).clamp(min=0)
    if geometry.window is not None:
        queries = queries.clamp(max=geometry.window + block)
    group = problem.q.shape[1] // problem.k.shape[1]
    of_programs = queries.unflatten(1, (-1, group)).sum(2).flatten(0, 1)
    return PlanOfKeys(_interleaved(plan), _longest_first(of_programs), _interleaved(reach))


def _interleaved(numbers: Tensor) -> Rows:
    return rows(numbers.movedim(0, -1).contiguous())


def _lengths(problem: calls.Problem) -> tuple[int, int, int] | tuple[Tensor, ...]:
    """Returns n_query, n_key and shift: numbers, or tensors (B, 1, 1) if there are sequences."""
    if problem.sequences is None:
        return problem.geometry.n_query, problem.geometry.n_key, 0
    return tuple(problem.sequences.rows[:, column, None, None] for column in (1, 3, 4))


def _longest_first(work: Tensor) -> Tensor:
    """Returns program numbers by decreasing work; work is (groups, blocks). int32"""
    return work.flatten().argsort(descending=True, stable=True).int()
