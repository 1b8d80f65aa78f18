"""Plans as the kernels take them: what each program has to do, and in which order they start."""

from __future__ import annotations

import torch
from torch import Tensor

from . import operands
from .operands import Plan, PlanOfKeys, Problem, Rows, rows
from .primitives import PLAN_TILE


def of_entries(plan: Plan | None, entries: slice) -> Plan | None:
    """The ranges of some batch entries, without programs."""
    if plan is None:
        return None
    return Plan(operands.of_entries(plan.keys, entries), plan.order)


def of_queries(plan: Tensor | None, problem: Problem, block: int) -> Plan | None:
    """For a pass with a program for each block of queries; plan (2, B, H, tiles) or None."""
    if plan is None:
        return None
    start = torch.arange(0, problem.n_query, block, device=plan.device)
    n_query, n_key, shift = _lengths(problem)
    shift = n_key - n_query + shift
    first, end = plan[..., start // PLAN_TILE.value]
    if problem.windowed.value:
        first = torch.maximum(first, start + shift - problem.window + 1)
    if problem.causal.value:
        end = torch.minimum(end, (start + block).clamp(max=n_query) + shift)
    return Plan(_side_by_side(plan), _longest_first((end - first).clamp(min=0).flatten(0, 1)))


def cut_of_tiles(cut: Tensor, block: int, from_end: bool) -> Tensor:
    """What all blocks of a tile of queries can do without: (B, H, blocks) to (B, H, tiles)."""
    per_tile = PLAN_TILE.value // block
    far = torch.iinfo(cut.dtype).min if from_end else torch.iinfo(cut.dtype).max
    padded = torch.nn.functional.pad(cut, (0, -cut.shape[2] % per_tile), value=far)
    of_blocks = padded.unflatten(2, (-1, per_tile))
    return of_blocks.amax(-1) if from_end else of_blocks.amin(-1)


def of_keys(plan: Tensor | None, problem: Problem, block: int) -> PlanOfKeys | None:
    """For a pass with a program for each block of keys of the heads that share them."""
    if plan is None:
        return None
    first_key, end_key = plan
    begin = torch.arange(0, problem.n_key, block, device=plan.device, dtype=torch.int32)
    n_query, n_key, shift = _lengths(problem)
    end = (begin + block).clamp(max=n_key).int()
    begin, end = (x.expand(*plan.shape[1:3], -1).contiguous() for x in (begin, end))
    # Tiles before the first one whose end key is beyond a key do not take it; and so on.
    some_begin = torch.searchsorted(end_key, begin, right=True)
    some_end = torch.searchsorted(first_key, end)
    all_begin = torch.searchsorted(end_key, end)
    all_end = torch.searchsorted(first_key, begin, right=True)
    reach = torch.stack([some_begin, some_end, all_begin, all_end]) * PLAN_TILE.value
    reach = reach.clamp(max=n_query).int()
    seen_from = begin - (n_key - n_query + shift) if problem.causal.value else 0 * begin
    queries = (reach[1] - torch.maximum(reach[0], seen_from)).clamp(min=0)
    if problem.windowed.value:
        queries = queries.clamp(max=problem.window + block)
    of_programs = queries.unflatten(1, (-1, problem.group)).sum(2).flatten(0, 1)
    return PlanOfKeys(_side_by_side(plan), _longest_first(of_programs), _side_by_side(reach))


def _side_by_side(numbers: Tensor) -> Rows:
    return rows(numbers.movedim(0, -1).contiguous())


def _lengths(problem: Problem) -> tuple[int, int, int] | tuple[Tensor, ...]:
    """Numbers of queries and keys, and the shift: of all sequences, or (B, 1, 1) of each."""
    if problem.sequences is None:
        return problem.n_query, problem.n_key, 0
    return tuple(problem.sequences[:, column, None, None] for column in (1, 3, 4))


def _longest_first(work: Tensor) -> Tensor:
    """The numbers of programs (groups, blocks), those with most work first. int32"""
    return work.flatten().argsort(descending=True, stable=True).int()
