"""What every form answers about keys that are left out: how much softmax mass it leaves to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..limits import TILE_KEYS


@dataclass(frozen=True)
class Side:
    """The keys before each query or, mirrored, after it, in the order of their distance.

    positions (n_query,) are those of the queries among n_key keys. Tiles of TILE_KEYS keys begin at
    multiples of it; mirrored, the first is cut short by `offset`.
    """

    positions: Tensor
    n_key: int
    offset: int = 0
    is_mirrored: bool = False

    @property
    def tiles(self) -> int:
        return -(-self.n_key // TILE_KEYS)

    def mirrored(self) -> Side:
        offset = -self.n_key % TILE_KEYS
        return Side(self.n_key - 1 - self.positions, self.n_key, offset, True)

    def cut(self, tile: Tensor) -> Tensor:
        return (TILE_KEYS * tile - self.offset).clamp(min=0)

    def at_queries(self, keys: Tensor) -> Tensor:
        """(..., n_key) to (..., n_query); queries beyond the keys get the nearest one's."""
        return keys[..., self.positions.clamp(0, self.n_key - 1)]

    def in_tiles(self, keys: Tensor) -> Tensor:
        """(..., n_key) to (..., tiles, TILE_KEYS), with -inf for keys that do not exist."""
        behind = self.tiles * TILE_KEYS - self.n_key - self.offset
        padded = torch.nn.functional.pad(keys, (self.offset, behind), value=-torch.inf)
        return padded.unflatten(-1, (self.tiles, TILE_KEYS))

    def prefix_max(self, keys: Tensor) -> Tensor:
        """The largest of the keys before each cut, (..., tiles + 1); NaN counts as infinity."""
        largest = self.in_tiles(keys.nan_to_num(torch.inf, torch.inf, -torch.inf)).amax(-1)
        return torch.nn.functional.pad(largest.cummax(-1).values, (1, 0), value=-torch.inf)


class Mass(Protocol):
    """An upper bound of the softmax mass of the keys before a cut, as far as it is the bias's."""

    side: Side

    def log_mass(self, rows: slice, tile: Tensor) -> Tensor:
        """At least log of the sum of exp(b_ij) over j < side.cut(tile), (B, H, rows) float64.

        rows selects queries; tile (B, H, rows) int64. It never falls as `tile` grows, and is NaN
        where nothing can be said.
        """
