"""Selects the keys of a chunk that the queries of another chunk need, from a summary of these keys.

The bound is the one of certificate.py, with the queries' lse over their own chunk instead of that
over their nearest keys. A summary of keys consists of their mean and, for each tile, the largest
distance from it and the extremes of the prefix sums. See DESIGN.md, "Context parallelism".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..forms import Form, KeySide, StateBounds, TailMass
from ..forms.chunk_pairs import Pair
from ..shared_constants import TILE_KEYS
from ..skipping.certificate import Certificate, Keys, rounding

# Key ranges end at a multiple of the kernels' key blocks, so that each block is sent whole or not
# at all.
KEY_BLOCK = 128


@dataclass(frozen=True)
class KeySummary:
    """A summary of the n keys of a chunk, in T tiles of TILE_KEYS. All float64.

    mean (B, Hkv, D); radius (B, Hkv, T), the largest distance from the mean, infinite if a key or
    value is not finite; lowest and highest prefix sum (B or 1, H or 1, T), or None.
    """

    n: int
    mean: Tensor
    radius: Tensor
    lowest: Tensor | None
    highest: Tensor | None

    @property
    def largest_norm(self) -> Tensor:
        """An upper bound on the norms of the keys, (B, Hkv, 1)."""
        return Keys(self.mean, self.radius).largest_norm

    @staticmethod
    def of(k: Tensor, v: Tensor, sums: Tensor | None) -> KeySummary:
        n = k.shape[2]
        keys = Keys.of(k, k.shape[1])
        finite = v.sum(3, dtype=torch.promote_types(v.dtype, torch.float32)).isfinite()
        distance = torch.where(finite & keys.distance.isfinite(), keys.distance, torch.inf)
        tiles = KeySide(torch.arange(n, device=k.device), n).in_tiles
        radius = tiles(distance).amax(-1)
        mean = keys.mean.double()
        if sums is None:
            return KeySummary(n, mean, radius, None, None)
        return KeySummary(n, mean, radius, -tiles(-sums).amax(-1), tiles(sums).amax(-1))

    def packed(self) -> Tensor:
        return torch.cat([x.flatten() for x in self._tensors()])

    def unpacked(self, numbers: Tensor) -> KeySummary:
        """Returns the summary that another rank packed, for a chunk of the same shape."""
        like = self._tensors()
        parts = numbers.split([x.numel() for x in like])
        parts = [x.view_as(own) for x, own in zip(parts, like, strict=True)]
        return KeySummary(self.n, *parts, *([None] * (4 - len(parts))))

    def _tensors(self) -> list[Tensor]:
        every = (self.mean, self.radius, self.lowest, self.highest)
        return [x for x in every if x is not None]


@dataclass(frozen=True)
class Queries:
    """The n queries of a chunk: q (B, H, n, D); their lse (B, H, n) over their own chunk; a bound
    on the norms of its keys (B, H, 1); their form, and its state, if any."""

    q: Tensor
    lse: Tensor
    largest_norm: Tensor
    form: Form
    state: Tensor | None
    scale: float


def ranges(pair: Pair, queries: Queries, keys: KeySummary, tolerance: float) -> Tensor:
    """Returns the range [begin, end) of keys that are needed of each key head, (B, Hkv, 2) int64.

    The mass of the other keys is at most `tolerance`, divided by the maximum number of other
    chunks, times the mass of each query's own chunk.
    """
    kv_heads = keys.mean.shape[1]
    certificate = _certificate(pair, queries, keys)
    tile = certificate.last_cut(math.log(tolerance / pair.max_other_chunks)).amin(-1)
    cut = certificate.mass.side.cut(tile).unflatten(1, (kv_heads, -1)).amin(-1)
    begin, end = (torch.full_like(cut, key) for key in pair.visible_keys)
    if pair.is_past:
        begin = torch.maximum(begin, cut)
    else:
        blocks = (pair.n - cut + KEY_BLOCK - 1) // KEY_BLOCK
        end = (blocks * KEY_BLOCK).clamp(max=pair.n)
    return torch.where(begin < end, torch.stack([begin, end]), 0).movedim(0, -1)


def _certificate(pair: Pair, queries: Queries, keys: KeySummary) -> Certificate:
    group = queries.q.shape[1] // keys.mean.shape[1]
    mass = _mass(pair, queries, keys)
    mean, radius = (x.repeat_interleave(group, 1) for x in (keys.mean, keys.radius))
    own = Keys(mean.to(torch.promote_types(queries.q.dtype, torch.float32)), radius)
    length, product = own.query_terms(queries.q)
    logit = abs(queries.scale) * length
    lse = queries.lse.double()
    # The log of a sum over n keys exceeds the largest logit by at most log n.
    size = (
        logit * torch.maximum(own.largest_norm, queries.largest_norm),
        lse.abs() + math.log(pair.n),
    )
    lse = lse - rounding(queries.q, *size, queries.form)
    taken = torch.where(lse.isfinite(), lse, torch.nan) - queries.scale * product
    return Certificate(mass, slice(None), logit, taken, _prefix_max(radius, pair), 1)


def _mass(pair: Pair, queries: Queries, keys: KeySummary) -> TailMass:
    """Returns the mass of the bias over the keys, which are mirrored if they come after the
    queries."""
    n, i = pair.n, torch.arange(pair.n, device=keys.mean.device)
    side = KeySide(n + i, n) if pair.is_past else KeySide(2 * n - 1 - i, n, -n % TILE_KEYS, True)
    bounds = None
    if queries.state is not None:
        state_range = queries.state, keys.lowest, keys.highest
        if not pair.is_past:
            state_range = -queries.state, -keys.highest, -keys.lowest
        at_query, lowest, highest = state_range
        bounds = StateBounds(at_query, -_prefix_max(-lowest, pair), _prefix_max(highest, pair))
    return queries.form.mass_for_pair(pair, side, bounds)


def _prefix_max(tiles: Tensor, pair: Pair) -> Tensor:
    """Returns the maximum over the tiles before each cut, starting with the farthest: (.., T +
    1)."""
    tiles = tiles if pair.is_past else tiles.flip(-1)
    return torch.nn.functional.pad(tiles.cummax(-1).values, (1, 0), value=-torch.inf)
