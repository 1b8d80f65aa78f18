"""Which keys need not be computed: a plan, made so that what it leaves out is proved to be little.

A plan is an int32 tensor (2, B, H, query tiles). Queries [QUERY_TILE t, QUERY_TILE (t + 1)) take the
visible ones of the keys [plan[0, ..., t], plan[1, ..., t]), whose ends are multiples of KEY_STEP or
n_key and do not decrease with t. The keys left out hold at most `tolerance` times the sum of
exponentials of those that are taken. The bound and its proof are in DESIGN.md, "Certified skipping".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from . import backends
from .forms import Geometry
from .tail_mass import KEY_STEP, CumulativeMass, DistanceMass, LogSquareMass, Side

QUERY_TILE = 128
# The past keys nearest to a query, which it always takes; their sum bounds its lse from below.
NEAR = 128

_CHUNK = 2**20  # numbers of q or k that are looked at together
_SAMPLED_QUERIES, _SAMPLED_KEYS = 64, 256
_WORTHWHILE = 0.05  # the share of a head's keys that has to go before it is worth its plan


@dataclass(frozen=True)
class Bias:
    """What a plan depends on besides q and k: the arguments of the operators, without v."""

    terms: Tensor | None
    gain: Tensor | None
    form: str
    scale: float
    geometry: Geometry

    def of_heads(self, heads: Tensor) -> Bias:
        def select(x):
            return x if x is None or x.shape[1] == 1 else x[:, heads]

        gain, terms = select(self.gain), select(self.terms)
        return Bias(terms, gain, self.form, self.scale, self.geometry)

    def mass(self, side: Side, mirrored: bool) -> DistanceMass | CumulativeMass | LogSquareMass:
        terms, geometry = self.terms.double(), self.geometry
        if self.form in ("linear", "distance"):
            first = geometry.first_distance
            if self.form == "linear":
                terms = -terms[..., None] * geometry.distances(terms.device).abs()
            if mirrored:
                terms, first = terms.flip(-1), 1 - first - terms.shape[-1]
            return DistanceMass(side, terms, first)
        if mirrored:
            terms = -terms.flip(-1)
        make = LogSquareMass if self.form == "log1p_square" else CumulativeMass
        return make(side, terms, self.gain)

    @property
    def reach(self) -> int:
        """How many of the past keys are always taken."""
        window = self.geometry.window or NEAR
        return min(NEAR, window, self.geometry.n_key)


def make(q: Tensor, k: Tensor, v: Tensor, bias: Bias, tolerance: float, backend: str) -> Tensor:
    """The plan of heads where it saves enough to be worth making; the others take all keys."""
    plan = everything(q, bias.geometry)
    group = q.shape[1] // k.shape[1]
    worth = _promising(q, k, bias, tolerance).unflatten(0, (-1, group)).any(1)
    if not worth.any():
        return plan
    if worth.all():
        return certified(q, k, v, bias, tolerance, backend)
    kv_heads = worth.nonzero().squeeze(1)
    heads = (kv_heads[:, None] * group + torch.arange(group, device=q.device)).flatten()
    k, v = k[:, kv_heads], v[:, kv_heads]
    plan[:, :, heads] = certified(q[:, heads], k, v, bias.of_heads(heads), tolerance, backend)
    return plan


def query_tiles(n_query: int) -> int:
    return (n_query + QUERY_TILE - 1) // QUERY_TILE


def everything(q: Tensor, geometry: Geometry) -> Tensor:
    """The plan that leaves out nothing."""
    shape = (2, *q.shape[:2], query_tiles(geometry.n_query))
    plan = torch.zeros(shape, dtype=torch.int32, device=q.device)
    plan[1] = geometry.n_key
    return plan


def certified(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, tolerance: float, backend: str
) -> Tensor:
    """The plan that leaves out whatever is proved to be worth less than tolerance."""
    geometry = bias.geometry
    keys = Keys.of(k, q.shape[1] // k.shape[1])
    length, offset = keys.seen_by(q)
    logit = abs(bias.scale) * length  # largest of a key of length 1
    near = _near_lse(q, k, bias, backend)
    rounding = _rounding(q.shape[3], logit * keys.longest, near, bias.gain)
    # A NaN or infinity among the values would be missed.
    known = near.isfinite() & _finite(v, q.shape[1])[..., None]
    sides = _sides(geometry, q.device)
    allowed = near - bias.scale * offset - rounding + math.log(tolerance / len(sides))
    allowed = torch.where(known, allowed, torch.nan)

    plan = everything(q, geometry)
    for mirrored, side in enumerate(sides):
        mass = bias.mass(side, bool(mirrored))
        radius = side.prefix_max(keys.distance.flip(-1) if mirrored else keys.distance)
        tile = _last_cut(mass, slice(None), radius, logit, allowed, 1 if mirrored else bias.reach)
        behind = -tile.shape[-1] % QUERY_TILE
        tile = torch.nn.functional.pad(tile, (0, behind), value=side.tiles)
        cut = side.cut(tile.unflatten(-1, (-1, QUERY_TILE)).amin(-1))
        if mirrored:
            plan[1] = (geometry.n_key - cut).cummax(-1).values
        else:
            plan[0] = cut.flip(-1).cummin(-1).values.flip(-1)
    return plan


@dataclass(frozen=True)
class Keys:
    """Where the keys of each query head lie about their mean."""

    mean: Tensor  # (B, H, D)
    distance: Tensor  # of each key from the mean, (B, H, n_key) float64
    longest: Tensor  # at least the length of any key, (B, H, 1) float64

    @staticmethod
    def of(k: Tensor, group: int) -> Keys:
        real = torch.promote_types(k.dtype, torch.float32)
        mean = k.mean(2, dtype=real)
        distance = torch.cat(
            [torch.linalg.vector_norm(x.to(real) - mean[:, :, None], dim=-1) for x in _chunks(k)], 2
        ).double()
        longest = distance.amax(-1, keepdim=True) + mean.double().norm(dim=-1, keepdim=True)
        return Keys(*(x.repeat_interleave(group, 1) for x in (mean, distance, longest)))

    def seen_by(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The length of each query and its product with the mean, (B, H, n_query) float64."""
        lengths, products = [], []
        for chunk in _chunks(q):
            x = chunk.to(self.mean.dtype)
            lengths.append(torch.linalg.vector_norm(x, dim=-1))
            products.append((x @ self.mean[..., None]).squeeze(-1))
        return torch.cat(lengths, 2).double(), torch.cat(products, 2).double()


def _near_lse(q: Tensor, k: Tensor, bias: Bias, backend: str) -> Tensor:
    """The lse of each query over its nearest past keys, (B, H, n_query) float64.

    It is that of attention with a window to values that do not matter.
    """
    values = k.new_zeros(1).expand(*k.shape[:3], 1)
    terms, gain, scale = bias.terms, bias.gain, bias.scale
    if bias.form == "distance":
        terms = terms[..., -bias.geometry.first_distance :][..., : bias.reach]
    forward = backends.kernels(backend).forward
    return forward(q, k, values, terms, gain, bias.form, scale, True, bias.reach)[1].double()


def _chunks(x: Tensor) -> tuple[Tensor, ...]:
    batch, heads, _, dim = x.shape
    return x.split(max(KEY_STEP, _CHUNK // max(1, batch * heads * dim)), 2)


def _sides(geometry: Geometry, device: torch.device) -> list[Side]:
    past = Side(geometry.positions(device), geometry.n_key)
    return [past] if geometry.causal else [past, past.mirrored()]


def _finite(v: Tensor, heads: int) -> Tensor:
    """Whether all values of each query head are finite, (B, H)."""
    total = v.sum((2, 3), dtype=torch.promote_types(v.dtype, torch.float32))
    return total.isfinite().repeat_interleave(heads // v.shape[1], 1)


def _rounding(dim: int, logit: Tensor, near: Tensor, gain: Tensor | None) -> Tensor:
    """What float32 may have changed the bound by."""
    size = 1 + logit + near.abs()
    if gain is not None:
        size = size + KEY_STEP * gain.double().abs()
    return 2**-10 + 2**-23 * (4 * dim + 256) * size


def _last_cut(mass, rows: slice, radius: Tensor, logit: Tensor, allowed: Tensor, reach: int):
    """For each query the last tile before which all keys may go, (B, H, rows) int64.

    They may where logit radius + log_mass <= allowed, which rises with the tile: a binary search.
    Keys nearer than `reach` stay.
    """
    side = mass.side
    last = (side.positions[rows] - reach + 1 + side.offset) // KEY_STEP
    high = last.clamp(0, side.tiles).expand(allowed.shape).clone()
    low = torch.zeros_like(high)
    for _ in range(side.tiles.bit_length()):
        middle = (low + high + 1) // 2
        bound = logit * radius.gather(-1, middle) + mass.log_mass(rows, middle)
        may_go = (bound <= allowed) & (low < high)
        low = torch.where(may_go, middle, low)
        high = torch.where(may_go, high, torch.maximum(middle - 1, low))
    return low


def _promising(q: Tensor, k: Tensor, bias: Bias, tolerance: float) -> Tensor:
    """Whether a head is expected to lose a worthwhile share of its keys, (H,) bool.

    A guess, from some of the queries and keys as if these were Gaussian. It costs next to nothing
    beside the attention of a head that cannot lose any.
    """
    geometry = bias.geometry
    rows = slice(0, None, max(1, geometry.n_query // _SAMPLED_QUERIES))
    sample = k[:, :, :: max(1, geometry.n_key // _SAMPLED_KEYS)]
    keys = Keys.of(sample, q.shape[1] // k.shape[1])
    logit = abs(bias.scale) * keys.seen_by(q[:, :, rows])[0]
    radius = keys.distance.amax(-1, keepdim=True)
    variance = keys.distance.square().mean(-1, keepdim=True) / q.shape[3]
    gone = taken = 0.0
    for mirrored, side in enumerate(_sides(geometry, q.device)):
        mass = bias.mass(side, bool(mirrored))
        position = side.positions[rows].expand(logit.shape)
        here = ((position + 1) // KEY_STEP).clamp(0, side.tiles)
        near = torch.logaddexp(mass.log_mass(rows, here), logit.new_tensor(math.log(KEY_STEP)))
        allowed = near + logit.square() * variance + math.log(tolerance)
        radii = radius.expand(*logit.shape[:2], side.tiles + 1)
        cut = side.cut(_last_cut(mass, rows, radii, logit, allowed, 1))
        gone = gone + cut.sum((0, 2))
        taken = taken + (position + 1).clamp(min=0).sum((0, 2))
    return gone > _WORTHWHILE * taken
