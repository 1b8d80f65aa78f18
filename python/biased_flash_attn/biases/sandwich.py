"""Sandwich and its smoothed form (Chi et al., 2023): biases from sinusoidal position embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .distance import DistanceBias
from .parameters import positive, positive_int


class Sandwich(DistanceBias):
    """b(d) = (sum_i cos(d / 10000^(2i/dbar)) - dbar/2) / h over dbar/2 frequencies (eq. 6).

    The sum is the inner product of two sinusoidal position embeddings of width dbar, an even
    number. The compression ratio is h = 8n/H for head n = 1..H; trainable=True makes the ratios
    the parameter `ratios`, (num_heads,), clamped to at least 0.01.

    i starts at first_frequency: 1 as in the paper's equations, or 0 as in its code (which also
    omits dbar/2, a constant to which softmax is invariant).
    """

    def __init__(
        self,
        num_heads: int,
        dbar: int = 128,
        first_frequency: int = 1,
        trainable: bool = False,
    ):
        super().__init__(num_heads)
        self.dbar = positive_int("dbar", dbar)
        if dbar % 2:
            raise ValueError(f"dbar must be even, not {dbar}")
        if first_frequency not in (0, 1):
            raise ValueError(f"first_frequency must be 0 or 1, not {first_frequency!r}")
        self.first_frequency = first_frequency
        self.fixed = not trainable
        self.ratios = None
        if trainable:
            self.ratios = nn.Parameter(torch.empty(self.num_heads))
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.ratios is not None:
            self.ratios.copy_(compression_ratios(self.num_heads, self.ratios.device))

    def formula(self, d: Tensor) -> Tensor:
        n_frequencies = self.dbar // 2
        i = torch.arange(n_frequencies, dtype=d.dtype, device=d.device) + self.first_frequency
        angles = torch.outer(d, 10000 ** (-2 * i / self.dbar))
        # In place, because the angles need many times the memory of the table.
        product = angles.cos_().sum(-1)
        if self.ratios is None:
            h = compression_ratios(self.num_heads, d.device)
        else:
            h = positive(self.ratios)
        return (product - n_frequencies) / h[:, None]


class SmoothedSandwich(DistanceBias):
    """b(d) = (8/h) (-0.825 log(1 + |d|) - 0.8), h = 8n/H for head n = 1..H.

    The paper fits this curve to Sandwich at h = 8 (figure 9); other heads are scaled likewise.
    """

    fixed = True

    def formula(self, d: Tensor) -> Tensor:
        h = compression_ratios(self.num_heads, d.device)
        return 8 / h[:, None] * (-0.825 * torch.log1p(d.abs()) - 0.8)


def compression_ratios(num_heads: int, device: torch.device | None = None) -> Tensor:
    """h = 8n/H for n = 1..H, (num_heads,) float64."""
    return torch.arange(1, num_heads + 1, dtype=torch.float64, device=device) * 8 / num_heads
