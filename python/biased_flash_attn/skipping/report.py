"""`attention_plan`: reports the tiles that a call computes, and the bounds that justify
skipping."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import prepared
from ..geometry import Geometry
from ..operators import planned
from ..problem import Problem
from ..shared_constants import PLAN_QUERIES, TILE_KEYS
from ..validation import refuse_meta
from . import plans
from .certificate import Certificate, Keys


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """The keys that a call attends to. Shapes: B batch, H heads, T tiles of 128 queries.

    A query of tile t attends to the visible keys in [first_key, end_key). The softmax mass of the
    other visible keys is proved to be at most `bound` times the mass of these.

    Attributes:
        geometry: the positions of queries and keys.
        tolerance: the fraction of a query's softmax mass that may be skipped.
        first_key: (B, H, T) int32.
        end_key: (B, H, T) int32.
        fraction: the fraction of the visible tiles, 128 queries by 64 keys, that is computed,
            (B, H).
        window: the largest distance, plus one, of a query and a key it attends to, (B, H) int64.
        bound: the upper bound on the skipped mass relative to the other mass, at most tolerance,
            (B, H).
        content: the largest amount by which q.k can exceed that of the average key, (B, H). The
            decay of the bias must outweigh it before keys can be skipped without computing their
            logits.
        receptive_field: the number of keys that hold all but a fraction `tolerance` of the sum of
            the bias's exponentials, (H,); infinite if that sum diverges, None for a bias without
            distances.
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
        """Returns a matplotlib figure of the key ranges of each head of the first sequence, and the
        fraction of tiles computed.

        Raises ModuleNotFoundError if matplotlib is not installed.
        """
        try:  # optional dependencies
            import numpy as np
            from matplotlib import colormaps
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{error.name} is missing: pip install 'biased-flash-attn[plot]'"
            ) from error
        geometry, heads = self.geometry, self.fraction.shape[1]
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        figure.suptitle(f"computed tiles at tolerance {self.tolerance:.3g}")
        keys, tiles = figure.subplots(1, 2)
        colors = colormaps["viridis"](np.linspace(0, 1, heads))
        fraction, first_key, end_key = (
            x[0].cpu().numpy() for x in (100 * self.fraction, self.first_key, self.end_key)
        )
        queries = np.arange(first_key.shape[1]) * PLAN_QUERIES
        if geometry.causal:
            position = queries + geometry.n_key - geometry.n_query
            end_key = np.minimum(end_key, position + PLAN_QUERIES)
        for first, end, color in zip(first_key, end_key, colors, strict=True):
            keys.step(queries, first, color=color, where="post")
            keys.fill_between(queries, first, end, color=color, alpha=0.15, step="post")
        keys.set(xlabel="query", ylabel="key range", ylim=(0, max(geometry.n_key, 1)))

        tiles.bar(range(heads), fraction, color=colors)
        tiles.set(xlabel="head", ylabel="tiles computed, %", ylim=(0, 112), xticks=range(heads))
        for h in range(heads):
            field = "" if self.receptive_field is None else f"\n{self.receptive_field[h]:.3g}"
            label = f"{self.window[0, h]}{field}"
            tiles.annotate(label, (h, fraction[h]), ha="center", va="bottom", fontsize=7)
        tiles.set_title("above each bar: window, receptive field of the bias", fontsize=9)
        return figure


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
    """Returns the plan by which `biased_flash_attn` would compute these arguments.

    The arguments and the errors are those of `biased_flash_attn`. Keys are skipped only by backends
    with kernels, for sequences of at least 1024 keys, and in heads where skipping is expected to
    save more time than computing the plan takes.
    """
    refuse_meta("q", q)
    problem = prepared(q, k, k, bias, causal, window, scale, tolerance, backend)
    geometry = problem.geometry
    full = plans.full_plan(problem.q, geometry)
    plan = planned(problem).plan
    if plan is None:
        plan = full
    seen, taken = _taken(full, geometry), _taken(plan, geometry)
    keys = Keys.of(problem.k, problem.q.shape[1])
    field = getattr(bias, "receptive_field", None)
    return AttentionPlan(
        geometry,
        problem.tolerance,
        *plan,
        fraction=taken.sum(-1) / seen.sum(-1).clamp(min=1),
        window=_reach(plan, geometry),
        bound=_bound(problem, plan),
        content=abs(problem.scale)
        * _largest(keys.query_terms(problem.q)[0])
        * _largest(keys.distance),
        receptive_field=field(problem.tolerance) if field and problem.tolerance else None,
    )


def _ends(plan: Tensor, geometry: Geometry) -> tuple[Tensor, ...]:
    """Returns the positions of each tile's first and last query, and their key range [begin,
    end)."""
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
    """Returns the number of key tiles computed for each tile of queries, (B, H, T) float64."""
    _, _, begin, end = _ends(plan, geometry)
    tiles = (end + TILE_KEYS - 1) // TILE_KEYS - begin // TILE_KEYS
    return torch.where(begin < end, tiles, 0).double()


def _reach(plan: Tensor, geometry: Geometry) -> Tensor:
    """Returns the largest distance, plus one, of a query and a key it attends to, (B, H)."""
    first, last, begin, end = _ends(plan, geometry)
    back = last + 1 - begin
    if geometry.window is not None:
        back = back.clamp(max=geometry.window)
    return _largest(torch.maximum(back, end - first))


def _bound(problem: Problem, plan: Tensor) -> Tensor:
    """Returns the bound on the mass of skipped keys relative to the others, (B, H) float64."""
    bound = torch.zeros(plan.shape[1:3], dtype=torch.float64, device=plan.device)
    if not ((plan[0] > 0) | (plan[1] < problem.geometry.n_key)).any():
        return bound
    certificates, _ = Certificate.of(problem)
    fraction = plans.fraction_of(problem.tolerance, certificates)
    unseen = plans.bounded(certificates, fraction, plans.full_plan(problem.q, problem.geometry))
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
    """Reduces (B, H, n) to the maxima (B, H), or to 0 if n is 0."""
    return x.amax(-1) if x.shape[-1] else x.sum(-1)
