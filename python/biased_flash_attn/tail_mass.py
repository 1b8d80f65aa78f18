"""How much softmax mass a bias leaves, at most, to all keys before some key.

Each class answers for one form: `log_mass(rows, tile)` is an upper bound of

    log sum over j < cut(tile) of exp(b_ij)        cut(tile) = KEY_STEP * tile - offset

in float64, for the queries `rows` selects. It never falls as `tile` grows, and is NaN where nothing
can be said.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KEY_STEP = 64
# What may underflow in a sum of up to 2^40 exponentials, relative to the largest of them.
_LOST = 1e-290
_GAINS, _SAMPLED_GAINS = 5, 512  # for which sums are taken, and among which these are chosen


@dataclass(frozen=True)
class Side:
    """The keys before each query or, mirrored, after it, in the order of their distance.

    positions (n_query,) are those of the queries among n_key keys. Tiles of KEY_STEP keys begin at
    multiples of it; mirrored, the first is cut short by `offset`.
    """

    positions: Tensor
    n_key: int
    offset: int = 0
    is_mirrored: bool = False

    @property
    def tiles(self) -> int:
        return -(-self.n_key // KEY_STEP)

    def mirrored(self) -> Side:
        offset = -self.n_key % KEY_STEP
        return Side(self.n_key - 1 - self.positions, self.n_key, offset, True)

    def cut(self, tile: Tensor) -> Tensor:
        return (KEY_STEP * tile - self.offset).clamp(min=0)

    def at_queries(self, keys: Tensor) -> Tensor:
        """(..., n_key) to (..., n_query); queries beyond the keys get the nearest one's."""
        return keys[..., self.positions.clamp(0, self.n_key - 1)]

    def in_tiles(self, keys: Tensor) -> Tensor:
        """(..., n_key) to (..., tiles, KEY_STEP), with -inf for keys that do not exist."""
        behind = self.tiles * KEY_STEP - self.n_key - self.offset
        padded = torch.nn.functional.pad(keys, (self.offset, behind), value=-torch.inf)
        return padded.unflatten(-1, (self.tiles, KEY_STEP))

    def prefix_max(self, keys: Tensor) -> Tensor:
        """The largest of the keys before each cut, (..., tiles + 1); NaN counts as infinity."""
        largest = self.in_tiles(keys.nan_to_num(torch.inf, torch.inf, -torch.inf)).amax(-1)
        return torch.nn.functional.pad(largest.cummax(-1).values, (1, 0), value=-torch.inf)


class DistanceMass:
    """Of a table (B or 1, H or 1, n) over the distances from `first` on: exact sums of its end."""

    def __init__(self, side: Side, table: Tensor, first: int):
        self.side, self.first = side, first
        peak = table.amax(-1, keepdim=True)
        beyond = (table - peak).exp_().flip(-1).cumsum(-1).flip(-1)
        logs = beyond.add_(_LOST).log_().add_(peak)
        self.log_beyond = torch.nn.functional.pad(logs, (0, 1), value=-torch.inf)

    def log_mass(self, rows: slice, tile: Tensor) -> Tensor:
        distance = self.side.positions[rows] - self.side.cut(tile) + 1
        entry = (distance - self.first).clamp(0, self.log_beyond.shape[-1] - 1)
        return self.log_beyond.expand(*tile.shape[:2], -1).gather(-1, entry)


class CumulativeMass:
    """Of sums C (B or 1, H or 1, n_key) and gains (.., n_query) or None: b = g_i (C[p_i] - C[j]).

    log sum_j exp(-g C[j]) is convex in g, so that its chord between two gains bounds it in between:
    it is summed for a few gains only, those that divide the queries evenly.
    """

    def __init__(self, side: Side, sums: Tensor, gain: Tensor | None):
        self.side = side
        self.at_query = side.at_queries(sums)
        if gain is None:
            self.gain, self.left, self.share = None, None, None
            self.log_sums = self._prefixes(sums)[..., None, :]
            return
        self.gain = gain.double()
        # The smallest gains decide what a tile of queries may leave out: most nodes are among them.
        sample = self.gain[..., :: max(1, self.gain.shape[-1] // _SAMPLED_GAINS)].sort(-1).values
        nodes = torch.linspace(0, 1, _GAINS, device=gain.device) ** 3 * (sample.shape[-1] - 1)
        grid = sample[..., nodes.round().long()]
        grid[..., 0], grid[..., -1] = self.gain.amin(-1), self.gain.amax(-1)
        self.left = (torch.searchsorted(grid, self.gain, right=True) - 1).clamp(0, _GAINS - 2)
        low, high = grid.gather(-1, self.left), grid.gather(-1, self.left + 1)
        self.share = torch.where(high > low, (self.gain - low) / (high - low), 0)
        prefixes = [self._prefixes(grid[..., n, None] * sums) for n in range(_GAINS)]
        self.log_sums = torch.stack(prefixes, -2)

    def _prefixes(self, sums: Tensor) -> Tensor:
        """log sum over j < cut of exp(-sums), (..., tiles + 1)."""
        of_tiles = self.side.in_tiles(-sums).logsumexp(-1)
        return torch.nn.functional.pad(of_tiles.logcumsumexp(-1), (1, 0), value=-torch.inf)

    def log_mass(self, rows: slice, tile: Tensor) -> Tensor:
        stride = self.log_sums.shape[-1]
        flat = self.log_sums.flatten(-2).expand(*tile.shape[:2], -1)
        if self.gain is None:
            return flat.gather(-1, tile) + self.at_query[..., rows]
        low = tile + stride * self.left[..., rows]
        share = self.share[..., rows]
        chord = flat.gather(-1, low) * (1 - share) + flat.gather(-1, low + stride) * share
        return chord + self.gain[..., rows] * self.at_query[..., rows]


class LogSquareMass:
    """Of b = -log(1 + g_i^2 (C[p_i] - C[j])^2): as if all keys had the nearest sum."""

    def __init__(self, side: Side, sums: Tensor, gain: Tensor | None):
        self.side = side
        self.at_query = side.at_queries(sums)
        self.gain = torch.ones_like(self.at_query) if gain is None else gain.double()
        self.highest, self.lowest = side.prefix_max(sums), -side.prefix_max(-sums)

    def log_mass(self, rows: slice, tile: Tensor) -> Tensor:
        highest, lowest = (
            x.expand(*tile.shape[:2], -1).gather(-1, tile) for x in (self.highest, self.lowest)
        )
        at_query = self.at_query[..., rows]
        gap = torch.maximum(at_query - highest, lowest - at_query).clamp(min=0)
        beta = self.gain[..., rows] * gap
        return torch.log(self.side.cut(tile)) - torch.log1p(beta.square())


Mass = DistanceMass | CumulativeMass | LogSquareMass
