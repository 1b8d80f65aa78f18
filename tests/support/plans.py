"""Plans that tests choose, and problems whose keys are restricted to those of a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from biased_flash_attn import operators
from biased_flash_attn.forms import Geometry
from biased_flash_attn.shared_constants import PLAN_QUERIES
from biased_flash_attn.skipping import plans
from tests.support.cases import Case
from tests.support.problems import Problem, prepared_call


def kept_mask(plan: Tensor, geometry: Geometry) -> Tensor:
    """Whether query i attends to key j under a plan, (B, H, n_query, n_key)."""
    tile = torch.arange(geometry.n_query) // PLAN_QUERIES
    first, end = plan[..., tile, None]
    j = torch.arange(geometry.n_key)
    return (first <= j) & (j < end)


@dataclass(frozen=True)
class PlannedGeometry(Geometry):
    """Visibility that differs between heads. Only the oracle reads it."""

    plan: Tensor | None = None

    def visible(self, device: torch.device | None = None) -> Tensor:
        return super().visible(device) & kept_mask(self.plan, self)


@dataclass(frozen=True)
class PlannedCase(Case):
    """A case that is restricted to some plan."""

    plan: Tensor | None = None

    @property
    def geometry(self) -> Geometry:
        return PlannedGeometry(*self.lengths, self.causal, self.window, plan=self.plan)


def random_plan(case: Case, *, some_empty: bool = True) -> Tensor:
    """Random key ranges, whose beginnings and ends never decrease. some_empty: whether ranges may
    be empty; the keys of others may still be masked."""
    n_query, n_key = case.lengths
    shape = (2, case.batch, case.heads[0], plans.query_tiles(n_query))
    first, end = torch.randint(n_key + 1, shape).sort(-1).values
    if not some_empty:
        first, end = first // 2, n_key - (n_key - end) // 2
        end = torch.full_like(end, n_key) if case.causal else end
    elif torch.rand(()) < 0.7:
        end = torch.maximum(first, end)
    end = torch.where(torch.rand(()) < 0.3, n_key, end)
    return torch.stack([first, end.cummax(-1).values]).int()


def planned(problem: Problem, backend: str = "cpu") -> tuple[Tensor, Tensor]:
    """The results of a problem with the plan of its case."""
    call = prepared_call(problem, backend, tolerance=0.0)
    o, lse, *_ = operators.forward(replace(call, plan=problem.case.plan))
    return o, lse
