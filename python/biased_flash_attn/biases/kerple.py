"""KERPLE, kernelized relative positional embedding (Chi et al., 2022): log and power forms.

Parameters are initialized and clamped to at least 0.01 as in the authors' code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .distance import DistanceBias
from .parameters import positive


class KerpleLog(DistanceBias):
    """b(d) = -r1 log(1 + r2 |d|), with r1, r2 > 0 trained per head."""

    def __init__(self, num_heads: int):
        super().__init__(num_heads)
        self.r1 = nn.Parameter(torch.empty(self.num_heads))
        self.r2 = nn.Parameter(torch.empty(self.num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.r1, 0, 2)
        nn.init.uniform_(self.r2)

    def formula(self, d: Tensor) -> Tensor:
        r1, r2 = positive(self.r1)[:, None], positive(self.r2)[:, None]
        return -r1 * torch.log1p(r2 * d.abs())


class KerplePower(DistanceBias):
    """b(d) = -r1 |d|^r2, with r1 > 0 and 0 < r2 <= 2 trained per head."""

    def __init__(self, num_heads: int):
        super().__init__(num_heads)
        self.r1 = nn.Parameter(torch.empty(self.num_heads))
        self.r2 = nn.Parameter(torch.empty(self.num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.r1)
        nn.init.uniform_(self.r2, 0, 2)

    def formula(self, d: Tensor) -> Tensor:
        r1, r2 = positive(self.r1)[:, None], positive(self.r2, most=2)[:, None]
        return -r1 * d.abs() ** r2
