"""Bounds of the softmax mass of skipped keys, which every form that may skip provides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..shared_constants import TILE_KEYS


@dataclass(frozen=True)
class KeySide:
    """The keys before each query or, mirrored, after it, in the order of their distance.

    positions (n_query,) are those of the queries among n_key keys. Tiles of TILE_KEYS keys begin at
    multiples of TILE_KEYS; the first tile of a mirrored side lacks `offset` keys.
    """

    positions: Tensor
    n_key: int
    offset: int = 0
    is_mirrored: bool = False

    @property
    def tiles(self) -> int:
        return -(-self.n_key // TILE_KEYS)

    def mirrored(self) -> KeySide:
        offset = -self.n_key % TILE_KEYS
        return KeySide(self.n_key - 1 - self.positions, self.n_key, offset, True)

    def cut(self, tile: Tensor) -> Tensor:
        return (TILE_KEYS * tile - self.offset).clamp(min=0)

    def at_queries(self, keys: Tensor) -> Tensor:
        """Gathers (..., n_key) at the queries' positions, clamped to the keys: (..., n_query)."""
        return keys[..., self.positions.clamp(0, self.n_key - 1)]

    def in_tiles(self, keys: Tensor) -> Tensor:
        """Reshapes (..., n_key) to (..., tiles, TILE_KEYS), padded with -inf."""
        behind = self.tiles * TILE_KEYS - self.n_key - self.offset
        padded = torch.nn.functional.pad(keys, (self.offset, behind), value=-torch.inf)
        return padded.unflatten(-1, (self.tiles, TILE_KEYS))

    def prefix_max(self, keys: Tensor) -> Tensor:
        """The maximum over the keys before each cut, (..., tiles + 1), with NaN as infinity."""
        largest = self.in_tiles(keys.nan_to_num(torch.inf, torch.inf, -torch.inf)).amax(-1)
        return torch.nn.functional.pad(largest.cummax(-1).values, (1, 0), value=-torch.inf)


class TailMass(Protocol):
    """An upper bound of the bias's contribution to the softmax mass of the keys before a cut."""

    side: KeySide

    def log_mass(self, rows: slice, tile: Tensor) -> Tensor:
        """An upper bound of log sum exp(b_ij) over j < side.cut(tile), (B, H, rows) float64.

        rows selects queries; tile is (B, H, rows) int64. The bound does not decrease with `tile`,
        and is NaN where there is none.
        """
