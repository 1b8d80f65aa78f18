"""The distance table of a bias, which grows with a cache; each distance is evaluated once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..forms import Distance
from ..shared_constants import PEAK_DISTANCES


class DistanceTable:
    """table[d] of a bias for d = 0, 1, ..., and the maxima of its blocks of PEAK_DISTANCES entries.

    `is_of` detects changes of the bias's parameters; nothing else about the bias may change.
    """

    @staticmethod
    def serves(bias) -> bool:
        """Returns whether a bias is defined by its `logits` of distances, like a `DistanceBias`."""
        return isinstance(bias, nn.Module) and hasattr(bias, "logits")

    def __init__(self, bias: nn.Module, dtype: torch.dtype, device: torch.device):
        self.bias, self.versions = bias, _versions(bias)
        self.length = 0
        self.table = torch.empty((1, bias.num_heads, 0), dtype=dtype, device=device)
        self.peaks = self.table

    def is_of(self, bias) -> bool:
        return bias is self.bias and self.versions == _versions(bias)

    def upto(self, length: int) -> tuple[Distance, Tensor]:
        """Returns the form with `length` distances, and the maxima of its blocks."""
        if length > self.length:
            self._extend(length)
        peaks = -(-length // PEAK_DISTANCES)
        return Distance(self.table[..., :length]), self.peaks[..., :peaks]

    def _extend(self, length: int) -> None:
        """Evaluates only the new distances; the function may not accept larger ones."""
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
    """Returns the version counters of the parameters, except for tensors of inference mode."""
    return tuple(
        (x.data_ptr(), None if x.is_inference() else x._version) for x in bias.parameters()
    )
