"""Which keys of a chunk can matter to the queries of another, by what little is known of them.

The bound is that of certificate.py. The queries' lse over their own chunk takes the place of that
over their nearest keys, and of keys elsewhere there are a mean and, of each tile, how far from it
they lie at most and the ends of their running sums. See DESIGN.md, "Context parallelism".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..certificate import Certificate, Keys, rounding
from ..tail_mass import KEY_STEP, DistanceMass, Mass, Side
from .pairs import Pair

# What is sent ends with a block of keys of the kernels: these see all of it, or none.
KEY_BLOCK = 128


@dataclass(frozen=True)
class KnownKeys:
    """Of the n keys of a chunk, in T tiles of KEY_STEP. All float64.

    mean (B, Hkv, D); radius (B, Hkv, T), the largest distance from it, infinite where a key or
    value is not finite; lowest and highest running sum (B or 1, H or 1, T), or None.
    """

    n: int
    mean: Tensor
    radius: Tensor
    lowest: Tensor | None
    highest: Tensor | None

    @property
    def longest(self) -> Tensor:
        """At least the length of any key, (B, Hkv, 1)."""
        return Keys(self.mean, self.radius).longest

    @staticmethod
    def of(k: Tensor, v: Tensor, sums: Tensor | None) -> KnownKeys:
        n = k.shape[2]
        keys = Keys.of(k, k.shape[1])
        finite = v.sum(3, dtype=torch.promote_types(v.dtype, torch.float32)).isfinite()
        distance = torch.where(finite & keys.distance.isfinite(), keys.distance, torch.inf)
        tiles = Side(torch.arange(n, device=k.device), n).in_tiles
        radius = tiles(distance).amax(-1)
        mean = keys.mean.double()
        if sums is None:
            return KnownKeys(n, mean, radius, None, None)
        return KnownKeys(n, mean, radius, -tiles(-sums).amax(-1), tiles(sums).amax(-1))

    def packed(self) -> Tensor:
        return torch.cat([x.flatten() for x in self._tensors()])

    def unpacked(self, numbers: Tensor) -> KnownKeys:
        """What another rank packed of a chunk like this one."""
        like = self._tensors()
        parts = numbers.split([x.numel() for x in like])
        parts = [x.view_as(own) for x, own in zip(parts, like, strict=True)]
        return KnownKeys(self.n, *parts, *([None] * (4 - len(parts))))

    def _tensors(self) -> list[Tensor]:
        every = (self.mean, self.radius, self.lowest, self.highest)
        return [x for x in every if x is not None]


@dataclass(frozen=True)
class Queries:
    """Of the n queries of a chunk: q (B, H, n, D), lse (B, H, n) over what they take of their own
    chunk, its longest key (B, H, 1), their gain and, of a form with sums, those at the queries."""

    q: Tensor
    lse: Tensor
    longest: Tensor
    gain: Tensor | None
    sums: Tensor | None
    scale: float


@dataclass(frozen=True)
class SumsMass:
    """As if all keys before a cut had the sum, of those in their range, that the bias likes best.

    lowest and highest (.., T + 1) are those of all keys before each cut (tail_mass.py).
    """

    side: Side
    at_query: Tensor
    gain: Tensor
    lowest: Tensor
    highest: Tensor
    squared: bool

    def log_mass(self, rows: slice, tile: Tensor) -> Tensor:
        lowest, highest = (
            x.expand(*tile.shape[:2], -1).gather(-1, tile) for x in (self.lowest, self.highest)
        )
        at_query, gain = self.at_query[..., rows], self.gain[..., rows]
        if self.squared:
            gap = torch.maximum(at_query - highest, lowest - at_query).clamp(min=0)
            bias = -torch.log1p((gain * gap).square())
        else:
            bias = torch.maximum(gain * (at_query - lowest), gain * (at_query - highest))
        return torch.log(self.side.cut(tile)) + bias


def ranges(
    pair: Pair,
    queries: Queries,
    keys: KnownKeys,
    form: str,
    terms: Tensor | None,
    tolerance: float,
) -> Tensor:
    """From and to before which keys each key head has to be taken, (B, Hkv, 2) int64.

    What is left out holds at most `tolerance`, divided by the number of chunks of which some may
    be, of what each query takes of its own chunk. terms: those of the pair, of a form without sums.
    """
    kv_heads = keys.mean.shape[1]
    certificate = _certificate(pair, queries, keys, form, terms)
    tile = certificate.last_cut(math.log(tolerance / pair.others)).amin(-1)
    cut = certificate.mass.side.cut(tile).unflatten(1, (kv_heads, -1)).amin(-1)
    begin, end = (torch.full_like(cut, key) for key in pair.seen_keys)
    if pair.is_past:
        begin = torch.maximum(begin, cut)
    else:
        blocks = (pair.n - cut + KEY_BLOCK - 1) // KEY_BLOCK
        end = (blocks * KEY_BLOCK).clamp(max=pair.n)
    return torch.where(begin < end, torch.stack([begin, end]), 0).movedim(0, -1)


def _certificate(pair, queries: Queries, keys: KnownKeys, form: str, terms) -> Certificate:
    group = queries.q.shape[1] // keys.mean.shape[1]
    mass = _mass(pair, queries, keys, form, terms)
    mean, radius = (x.repeat_interleave(group, 1) for x in (keys.mean, keys.radius))
    own = Keys(mean.to(torch.promote_types(queries.q.dtype, torch.float32)), radius)
    length, product = own.seen_by(queries.q)
    logit = abs(queries.scale) * length
    lse = queries.lse.double()
    # An average over n keys of what their bias may be exceeds one over few by log n at most.
    size = logit * torch.maximum(own.longest, queries.longest), lse.abs() + math.log(pair.n)
    lse = lse - rounding(queries.q.shape[3], *size, queries.gain)
    taken = torch.where(lse.isfinite(), lse, torch.nan) - queries.scale * product
    return Certificate(mass, slice(None), logit, taken, _prefix_max(radius, pair), 1)


def _mass(pair: Pair, queries: Queries, keys: KnownKeys, form, terms) -> Mass | SumsMass:
    """Seen from the queries, and where keys come after them, from the other end."""
    n, i = pair.n, torch.arange(pair.n, device=keys.mean.device)
    side = Side(n + i, n) if pair.is_past else Side(2 * n - 1 - i, n, -n % KEY_STEP, True)
    if queries.sums is None:
        table = terms.double() if pair.is_past else terms.double().flip(-1)
        return DistanceMass(side, table, 0 if pair.is_past else 1)
    at_query, lowest, highest = queries.sums, keys.lowest, keys.highest
    if not pair.is_past:
        at_query, lowest, highest = -at_query, -highest, -lowest
    gain = torch.ones_like(at_query) if queries.gain is None else queries.gain.double()
    ends = -_prefix_max(-lowest, pair), _prefix_max(highest, pair)
    return SumsMass(side, at_query, gain, *ends, form == "log1p_square")


def _prefix_max(tiles: Tensor, pair: Pair) -> Tensor:
    """The largest before each cut, counted from the keys that are farthest: (.., T + 1)."""
    tiles = tiles if pair.is_past else tiles.flip(-1)
    return torch.nn.functional.pad(tiles.cummax(-1).values, (1, 0), value=-torch.inf)
