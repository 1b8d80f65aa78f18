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

from ..chunk_pairs import Pair
from ..forms import Form, Mass, Side, StateBounds
from ..limits import TILE_KEYS
from ..skipping.certificate import Certificate, Keys, rounding

# What is sent ends with a block of keys of the kernels: these see all of it, or none.
KEY_BLOCK = 128


@dataclass(frozen=True)
class KnownKeys:
    """Of the n keys of a chunk, in T tiles of TILE_KEYS. All float64.

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
    chunk, its longest key (B, H, 1), their form, and its state if it has one."""

    q: Tensor
    lse: Tensor
    longest: Tensor
    form: Form
    state: Tensor | None
    scale: float


def ranges(pair: Pair, queries: Queries, keys: KnownKeys, tolerance: float) -> Tensor:
    """From and to before which keys each key head has to be taken, (B, Hkv, 2) int64.

    What is left out holds at most `tolerance`, divided by the number of chunks of which some may
    be, of what each query takes of its own chunk.
    """
    kv_heads = keys.mean.shape[1]
    certificate = _certificate(pair, queries, keys)
    tile = certificate.last_cut(math.log(tolerance / pair.others)).amin(-1)
    cut = certificate.mass.side.cut(tile).unflatten(1, (kv_heads, -1)).amin(-1)
    begin, end = (torch.full_like(cut, key) for key in pair.seen_keys)
    if pair.is_past:
        begin = torch.maximum(begin, cut)
    else:
        blocks = (pair.n - cut + KEY_BLOCK - 1) // KEY_BLOCK
        end = (blocks * KEY_BLOCK).clamp(max=pair.n)
    return torch.where(begin < end, torch.stack([begin, end]), 0).movedim(0, -1)


def _certificate(pair: Pair, queries: Queries, keys: KnownKeys) -> Certificate:
    group = queries.q.shape[1] // keys.mean.shape[1]
    mass = _mass(pair, queries, keys)
    mean, radius = (x.repeat_interleave(group, 1) for x in (keys.mean, keys.radius))
    own = Keys(mean.to(torch.promote_types(queries.q.dtype, torch.float32)), radius)
    length, product = own.seen_by(queries.q)
    logit = abs(queries.scale) * length
    lse = queries.lse.double()
    # An average over n keys of what their bias may be exceeds one over few by log n at most.
    size = logit * torch.maximum(own.longest, queries.longest), lse.abs() + math.log(pair.n)
    lse = lse - rounding(queries.q.shape[3], *size, queries.form)
    taken = torch.where(lse.isfinite(), lse, torch.nan) - queries.scale * product
    return Certificate(mass, slice(None), logit, taken, _prefix_max(radius, pair), 1)


def _mass(pair: Pair, queries: Queries, keys: KnownKeys) -> Mass:
    """Seen from the queries, and where keys come after them, from the other end."""
    n, i = pair.n, torch.arange(pair.n, device=keys.mean.device)
    side = Side(n + i, n) if pair.is_past else Side(2 * n - 1 - i, n, -n % TILE_KEYS, True)
    bounds = None
    if queries.state is not None:
        state_range = queries.state, keys.lowest, keys.highest
        if not pair.is_past:
            state_range = -queries.state, -keys.highest, -keys.lowest
        at_query, lowest, highest = state_range
        bounds = StateBounds(at_query, -_prefix_max(-lowest, pair), _prefix_max(highest, pair))
    return queries.form.mass_of_pair(pair, side, bounds)


def _prefix_max(tiles: Tensor, pair: Pair) -> Tensor:
    """The largest before each cut, counted from the keys that are farthest: (.., T + 1)."""
    tiles = tiles if pair.is_past else tiles.flip(-1)
    return torch.nn.functional.pad(tiles.cummax(-1).values, (1, 0), value=-torch.inf)
