"""The table of a function of the distance that grows with a cache, evaluated once a distance."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..forms import Distance
from ..limits import PEAK_DISTANCES


class DistanceTable:
    """table[d] of a bias for d = 0, 1, ..., and its peaks.

    `is_of` detects changes of the bias's parameters; nothing else about the bias may change.
    """

    @staticmethod
    def serves(bias) -> bool:
        """Whether it is known by its `logits` of distances alone, as a `DistanceBias` is."""
        return isinstance(bias, nn.Module) and hasattr(bias, "logits")

    def __init__(self, bias: nn.Module, dtype: torch.dtype, device: torch.device):
        self.bias, self.versions = bias, _versions(bias)
        self.length = 0
        self.table = torch.empty((1, bias.num_heads, 0), dtype=dtype, device=device)
        self.peaks = self.table

    def is_of(self, bias) -> bool:
        return bias is self.bias and self.versions == _versions(bias)

    def upto(self, length: int) -> tuple[Distance, Tensor]:
        """The form with so many distances, and its largest entry in each PEAK_DISTANCES of them."""
        if length > self.length:
            self._extend(length)
        peaks = -(-length // PEAK_DISTANCES)
        return Distance(self.table[..., :length]), self.peaks[..., :peaks]

    def _extend(self, length: int) -> None:
        """Evaluates new distances only: some function may know no others."""
        table = self.table
        distances = torch.arange(self.length, length, dtype=torch.float64, device=table.device)
        new = self.bias.logits(distances).to(table.dtype)
        if table.device.type == "cpu" and new.isnan().any():
            raise ValueError("bias: its table values contain NaN")
        if length > table.shape[2]:
            blocks = max(-(-length // PEAK_DISTANCES), 2 * self.peaks.shape[2])
            with torch.inference_mode(False):
                longer = table.new_full((1, new.shape[1], blocks * PEAK_DISTANCES), -torch.inf)
                longer[..., : self.length] = table[:, : new.shape[1], : self.length]
                peaks = longer.unflatten(2, (-1, PEAK_DISTANCES)).amax(-1)
            self.table, self.peaks = longer, peaks
        self.table[..., self.length : length] = new
        first = self.length // PEAK_DISTANCES
        tiles = self.table.unflatten(2, (-1, PEAK_DISTANCES))[:, :, first:]
        self.peaks[..., first:] = tiles.amax(-1)
        self.length = length


def _versions(bias: nn.Module) -> tuple:
    """What changes when a parameter is written to, but for those of inference mode."""
    return tuple(
        (x.data_ptr(), None if x.is_inference() else x._version) for x in bias.parameters()
    )
