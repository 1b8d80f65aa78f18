"""`attention_plan`: what a call would compute, and what the proof of the rest is made from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import skipping
from .certificate import Bias, Certificate, Keys
from .forms import Geometry
from .functional import Call, prepared
from .skipping import QUERY_TILE
from .tail_mass import KEY_STEP


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """What a call computes. Shapes: B batch, H heads, T tiles of 128 queries.

    A query of tile t takes, of the keys it sees, those from first_key to before end_key. The mass
    of the others is proved to be at most `bound` times that of those it takes.

    Attributes:
        geometry: how queries and keys lie.
        tolerance: the share of a query's mass that may be left out.
        first_key: (B, H, T) int32.
        end_key: (B, H, T) int32.
        fraction: of the visible tiles, 128 queries by 64 keys, that is computed, (B, H).
        window: keys from a query to the farthest that it takes, at most, (B, H) int64.
        bound: of the mass left out, relative to that taken, at most tolerance, (B, H).
        content: by how much q.k can lift a key above the average one, (B, H): decay has to make up
            for it where keys are not looked at.
        receptive_field: keys that hold all but a share `tolerance` of the bias's exponentials,
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
            from . import plan_figure
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{error.name} is missing: pip install 'biased-flash-attn[plot]'"
            ) from error
        return plan_figure.draw(self)


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
    call = prepared(q, k, k, bias, causal, window, scale, tolerance, backend)
    q, k, geometry = call.q, call.k, call.geometry
    plan = call.plan()
    if plan is None:
        plan = skipping.everything(q, geometry)
    seen = _taken(skipping.everything(q, geometry), geometry)
    taken = _taken(plan, geometry)
    keys = Keys.of(k, q.shape[1])
    field = getattr(bias, "receptive_field", None)
    return AttentionPlan(
        geometry,
        call.tolerance,
        *plan,
        fraction=taken.sum(-1) / seen.sum(-1).clamp(min=1),
        window=_reach(plan, geometry),
        bound=_bound(call, plan),
        content=abs(call.scale) * _largest(keys.seen_by(q)[0]) * _largest(keys.distance),
        receptive_field=field(call.tolerance) if field and call.tolerance else None,
    )


def _ends(plan: Tensor, geometry: Geometry) -> tuple[Tensor, ...]:
    """The positions of each tile's first and last query, and from and to which keys they take."""
    tiles = torch.arange(plan.shape[-1], device=plan.device) * QUERY_TILE
    first = tiles + geometry.n_key - geometry.n_query
    last = (tiles + QUERY_TILE).clamp(max=geometry.n_query) + geometry.n_key - geometry.n_query - 1
    begin, end = plan
    if geometry.window is not None:
        begin = torch.maximum(begin, first - geometry.window + 1)
    if geometry.causal:
        end = torch.minimum(end, last + 1)
    return first, last, begin, torch.maximum(begin, end)


def _taken(plan: Tensor, geometry: Geometry) -> Tensor:
    """How many key tiles each tile of queries computes, (B, H, T) float64."""
    _, _, begin, end = _ends(plan, geometry)
    tiles = (end + KEY_STEP - 1) // KEY_STEP - begin // KEY_STEP
    return torch.where(begin < end, tiles, 0).double()


def _reach(plan: Tensor, geometry: Geometry) -> Tensor:
    """The largest count of keys from a query to the farthest that it takes, (B, H)."""
    first, last, begin, end = _ends(plan, geometry)
    back = last + 1 - begin
    if geometry.window is not None:
        back = back.clamp(max=geometry.window)
    return _largest(torch.maximum(back, end - first))


def _bound(call: Call, plan: Tensor) -> Tensor:
    """The certified mass of the keys left out, relative to those taken, (B, H) float64."""
    bound = torch.zeros(plan.shape[1:3], dtype=torch.float64, device=plan.device)
    if not ((plan[0] > 0) | (plan[1] < call.geometry.n_key)).any():
        return bound
    bias = Bias(call.form.terms, call.form.gain, *call.options()[:2], call.geometry)
    certificates, _ = Certificate.of(call.q, call.k, call.v, bias, call.backend)
    share = skipping.share_of(call.tolerance, certificates)
    unseen = skipping.bounded(certificates, share, skipping.everything(call.q, call.geometry))
    row = torch.arange(call.geometry.n_query, device=plan.device) // QUERY_TILE
    total = 0
    for certificate in certificates:
        side = certificate.mass.side
        cut, cut_unseen = (
            call.geometry.n_key - x[1] if side.is_mirrored else x[0] for x in (plan, unseen)
        )
        tile = ((torch.minimum(cut, cut_unseen) + side.offset) // KEY_STEP).long()[..., row]
        total = total + torch.where(tile > 0, certificate.log_bound(tile).exp(), 0)
        total = total + share * (cut > cut_unseen)[..., row]
    return _largest(total)


def _largest(x: Tensor) -> Tensor:
    """(B, H, n) to (B, H), 0 where n is."""
    return x.amax(-1) if x.shape[-1] else x.sum(-1)
