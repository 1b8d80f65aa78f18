"""Bounds per tile of the keys of a cache, for skipping: see DESIGN.md, "Decoding"."""

from __future__ import annotations

import torch
from torch import Tensor

from ..shared_constants import TILE_KEYS

_CHUNK = 2**18  # elements that are converted at a time, few enough for the CPU cache


class KeyBounds:
    """Bounds on the keys of complete tiles, T per page. Entries of incomplete tiles are undefined.

    centres: the mean of a tile's keys, rounded to their dtype, (pages, Hkv, T, D)
    extents: the largest distance of a key from the centre, and the largest norm of a key; infinite
        if a key or value is not finite, (pages, Hkv, T, 2) float32, or float64 for float64
    lowest, highest: the minima and maxima of a state of numbers, (pages, H or 1, T) in its dtype;
        of a state of vectors, None and the largest norm in the dtype of the extents
    """

    def __init__(self, pages: int, like: Tensor, state: Tensor | None):
        _, kv_heads, page_size, head_dim = like.shape
        self.tile_keys = min(TILE_KEYS, page_size)
        tiles = page_size // self.tile_keys
        real = torch.promote_types(like.dtype, torch.float32)
        self.centres = like.new_empty((pages, kv_heads, tiles, head_dim))
        self.extents = like.new_empty((pages, kv_heads, tiles, 2), dtype=real)
        self.lowest = self.highest = None
        if state is not None:
            shape = pages, state.shape[1], tiles
            is_number = state.dim() == 3
            self.highest = like.new_empty(shape, dtype=state.dtype if is_number else real)
            self.lowest = torch.empty_like(self.highest) if is_number else None

    def write(self, page: Tensor, tile: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> None:
        """Computes the bounds of tiles (n,) in pages (n,), which have become complete."""
        fitting = max(1, _CHUNK // (k.shape[1] * self.tile_keys * k.shape[3]))
        for some_pages, some_tiles in zip(page.split(fitting), tile.split(fitting), strict=True):
            at = some_pages, slice(None), some_tiles
            keys, values = (self._tiles(x)[at] for x in (k, v))  # (n, Hkv, keys, D or Dv)
            real = keys.to(self.extents.dtype)
            centres = real.mean(2).to(k.dtype)
            distance = (real - centres[:, :, None].to(real.dtype)).norm(dim=-1)
            extent = torch.stack([distance.amax(-1), real.norm(dim=-1).amax(-1)], -1)
            total = values.sum((2, 3), dtype=real.dtype)  # not finite if a value is not
            finite = total.isfinite() & extent.isfinite().all(-1)
            self.centres[at] = centres
            self.extents[at] = torch.where(finite[..., None], extent, torch.inf)
            if state is not None:
                self._bound_state(self._tiles(state)[at], at)

    def _bound_state(self, states: Tensor, at: tuple) -> None:
        """states: (n, H or 1, keys) or (n, H or 1, keys, channels)."""
        if states.dim() == 3:
            self.lowest[at], self.highest[at] = states.amin(-1), states.amax(-1)
        else:
            norms = states.double().norm(dim=-1) * (1 + 2**-16)  # not rounded down
            self.highest[at] = norms.amax(-1).to(self.highest.dtype)

    def copy_from(self, other: KeyBounds) -> None:
        """Copies the bounds of a smaller pool of pages."""
        for own, its in zip(self.tensors(), other.tensors(), strict=True):
            if its is not None:
                own[: its.shape[0]] = its

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.centres, self.extents, self.lowest, self.highest

    def _tiles(self, pages: Tensor) -> Tensor:
        return pages.unflatten(2, (-1, self.tile_keys))
