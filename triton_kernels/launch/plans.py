"""Converts plans to the layouts of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import problem as calls
from ... import schedule
from ...shared_constants import PLAN_QUERIES
from .. import operands
from ..operands import Plan, PlanOfKeys, Strided, strided


def for_entries(plan: Plan | None, entries: slice) -> Plan | None:
    """Selects the key ranges of some batch entries; `order` is left unchanged."""
    if plan is None:
        return None
    return Plan(operands.for_entries(plan.keys, entries), plan.order)


def for_queries(problem: calls.Problem, block: int) -> Plan | None:
    """Returns the plan for a kernel with one program per block of queries, or None without a
    plan."""
    if problem.plan is None:
        return None
    return Plan(_interleaved(problem.plan), schedule.for_queries(problem, block))


def combine_cuts(cut: Tensor, block: int, from_end: bool) -> Tensor:
    """Combines the cuts of the blocks of a plan tile into one that removes only keys that every
    block removes: (B, H, blocks) to (B, H, tiles)."""
    per_tile = PLAN_QUERIES // block
    far = torch.iinfo(cut.dtype).min if from_end else torch.iinfo(cut.dtype).max
    padded = torch.nn.functional.pad(cut, (0, -cut.shape[2] % per_tile), value=far)
    per_block = padded.unflatten(2, (-1, per_tile))
    return per_block.amax(-1) if from_end else per_block.amin(-1)


def for_keys(problem: calls.Problem, block: int) -> PlanOfKeys | None:
    """Returns the plan for a kernel with one program per block of keys of each key head."""
    if problem.plan is None:
        return None
    queries = schedule.reach_of_keys(problem, block)
    order = schedule.for_keys(problem, block, queries)
    return PlanOfKeys(_interleaved(problem.plan), order, _interleaved(queries))


def _interleaved(numbers: Tensor) -> Strided:
    return strided(numbers.movedim(0, -1).contiguous())
