"""Converts plans to the layouts of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import problem as calls
from ... import schedule
from ...shared_constants import PLAN_QUERIES
from .. import operands
from ..operands import Plan, PlanOfKeys, Strided, strided


def of_entries(plan: Plan | None, entries: slice) -> Plan | None:
    """Selects the key ranges of some batch entries; `order` is left unchanged."""
    if plan is None:
        return None
    return Plan(operands.of_entries(plan.keys, entries), plan.order)


def of_queries(problem: calls.Problem, block: int) -> Plan | None:
    """Returns the plan for a kernel with one program per block of queries, or None without a
    plan."""
    if problem.plan is None:
        return None
    return Plan(_interleaved(problem.plan), schedule.of_queries(problem, block))


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
    if problem.plan is None:
        return None
    queries = schedule.reach_of_keys(problem, block)
    order = schedule.of_keys(problem, block, queries)
    return PlanOfKeys(_interleaved(problem.plan), order, _interleaved(queries))


def _interleaved(numbers: Tensor) -> Strided:
    return strided(numbers.movedim(0, -1).contiguous())
