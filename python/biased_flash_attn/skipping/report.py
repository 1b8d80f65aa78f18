"""`attention_plan`: what a call would compute, and what the proof of the rest is made from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import planned, prepared
from ..geometry import Geometry
from ..limits import PLAN_QUERIES, TILE_KEYS
from ..problem import Problem
from . import plans
from .certificate import Certificate, Keys


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """What a call computes. Shapes: B batch, H heads, T tiles of 128 queries.

    A query of tile t takes, of the keys it sees, those from first_key to before end_key. The mass
    of the others is proved to be at most `bound` times that of those it takes.

    Attributes:
        geometry: how queries and keys lie.
        tolerance: the fraction of a query's softmax mass that may be skipped.
        first_key: (B, H, T) int32.
        end_key: (B, H, T) int32.
        fraction: of the visible tiles, 128 queries by 64 keys, that is computed, (B, H).
        window: keys from a query to the farthest that it takes, at most, (B, H) int64.
        bound: of the mass left out, relative to that taken, at most tolerance, (B, H).
        content: by how much q.k can lift a key above the average one, (B, H): decay has to make up
            for it where keys are not looked at.
        receptive_field: keys that hold all but a fraction `tolerance` of the bias's exponentials,
            (H,); infinite where these have no finite sum, and None for a bias without distances.
    """

    geometry: Geometry
    tolerance: float
    first_key: Tensor
    end_key: Tensor
    fraction: Tensor
    window: Tensor
    bound: Tensor
    content: Tensor
    receptive_field: Tensor | None

    def __str__(self) -> str:
        geometry = self.geometry
        lines = [
            f"{geometry.n_query} queries, {geometry.n_key} keys, tolerance {self.tolerance:.3g}:"
            f" {self.fraction.mean():.1%} of the visible tiles are computed",
            "head  tiles   window    bound  content  receptive field of the bias",
        ]
        for h in range(self.fraction.shape[1]):
            field = "-" if self.receptive_field is None else f"{self.receptive_field[h]:.6g}"
            lines.append(
                f"{h:4}  {self.fraction[:, h].mean():5.1%}  {self.window[:, h].max():7}"
                f"  {self.bound[:, h].max():7.1e}  {self.content[:, h].max():7.1f}  {field}"
            )
        return "\n".join(lines)

    def draw(self):
        """A matplotlib figure of what each head of the first sequence computes.

        Raises ModuleNotFoundError where matplotlib is not installed.
        """
        try:
            from . import figure
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{error.name} is missing: pip install 'biased-flash-attn[plot]'"
            ) from error
        return figure.draw(self)


@torch.no_grad()
def attention_plan(
    q: Tensor,
    k: Tensor,
    bias=None,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    tolerance: float | None = None,
    backend: str | None = None,
) -> AttentionPlan:
    """What `biased_flash_attn` computes of these arguments, and why it computes no less.

    The arguments mean what they mean there, and wrong ones raise the same errors. Keys are left out
    by kernels, where there are at least 1024 of them, and in heads where that is expected to take
    less time than to find out which.
    """
    problem = prepared(q, k, k, bias, causal, window, scale, tolerance, backend)
    geometry = problem.geometry
    everything = plans.everything(problem.q, geometry)
    plan = planned(problem).plan
    if plan is None:
        plan = everything
    seen, taken = _taken(everything, geometry), _taken(plan, geometry)
    keys = Keys.of(problem.k, problem.q.shape[1])
    field = getattr(bias, "receptive_field", None)
    return AttentionPlan(
        geometry,
        problem.tolerance,
        *plan,
        fraction=taken.sum(-1) / seen.sum(-1).clamp(min=1),
        window=_reach(plan, geometry),
        bound=_bound(problem, plan),
        content=abs(problem.scale) * _largest(keys.seen_by(problem.q)[0]) * _largest(keys.distance),
        receptive_field=field(problem.tolerance) if field and problem.tolerance else None,
    )


def _ends(plan: Tensor, geometry: Geometry) -> tuple[Tensor, ...]:
    """The positions of each tile's first and last query, and from and to which keys they take."""
    tiles = torch.arange(plan.shape[-1], device=plan.device) * PLAN_QUERIES
    ahead = geometry.n_key - geometry.n_query
    first, last = tiles + ahead, (tiles + PLAN_QUERIES).clamp(max=geometry.n_query) + ahead - 1
    begin, end = plan
    if geometry.window is not None:
        begin = torch.maximum(begin, first - geometry.window + 1)
    if geometry.causal:
        end = torch.minimum(end, last + 1)
    return first, last, begin, torch.maximum(begin, end)


def _taken(plan: Tensor, geometry: Geometry) -> Tensor:
    """How many key tiles each tile of queries computes, (B, H, T) float64."""
    _, _, begin, end = _ends(plan, geometry)
    tiles = (end + TILE_KEYS - 1) // TILE_KEYS - begin // TILE_KEYS
    return torch.where(begin < end, tiles, 0).double()


def _reach(plan: Tensor, geometry: Geometry) -> Tensor:
    """The largest count of keys from a query to the farthest that it takes, (B, H)."""
    first, last, begin, end = _ends(plan, geometry)
    back = last + 1 - begin
    if geometry.window is not None:
        back = back.clamp(max=geometry.window)
    return _largest(torch.maximum(back, end - first))


def _bound(problem: Problem, plan: Tensor) -> Tensor:
    """The certified mass of the keys left out, relative to those taken, (B, H) float64."""
    bound = torch.zeros(plan.shape[1:3], dtype=torch.float64, device=plan.device)
    if not ((plan[0] > 0) | (plan[1] < problem.geometry.n_key)).any():
        return bound
    certificates, _ = Certificate.of(problem)
    fraction = plans.fraction_of(problem.tolerance, certificates)
    unseen = plans.bounded(certificates, fraction, plans.everything(problem.q, problem.geometry))
    row = torch.arange(problem.geometry.n_query, device=plan.device) // PLAN_QUERIES
    total = 0
    for certificate in certificates:
        side = certificate.mass.side
        cut, cut_unseen = (
            problem.geometry.n_key - x[1] if side.is_mirrored else x[0] for x in (plan, unseen)
        )
        tile = ((torch.minimum(cut, cut_unseen) + side.offset) // TILE_KEYS).long()[..., row]
        total = total + torch.where(tile > 0, certificate.log_bound(tile).exp(), 0)
        total = total + fraction * (cut > cut_unseen)[..., row]
    return _largest(total)


def _largest(x: Tensor) -> Tensor:
    """(B, H, n) to (B, H), 0 where n is."""
    return x.amax(-1) if x.shape[-1] else x.sum(-1)
