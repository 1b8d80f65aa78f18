"""Rotary position embedding (Su et al., "RoFormer", 2021), as flash-attn applies it."""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x (B, n, heads, D) with its first 2R channels turned by the angles of its positions (B, n).

    cos and sin are (positions, R). Angle r turns the channels 2r and 2r + 1 if interleaved, else r
    and r + R. Computed in float32 at least, and rounded to the dtype of x once.
    """
    r = cos.shape[1]
    real = torch.promote_types(x.dtype, torch.float32)
    c, s = (table[positions].to(real)[:, :, None] for table in (cos, sin))
    turning, rest = x[..., : 2 * r], x[..., 2 * r :]
    if interleaved:
        a, b = turning.unflatten(-1, (r, 2)).to(real).unbind(-1)
    else:
        a, b = turning.to(real).split(r, -1)
    turned = a * c - b * s, a * s + b * c
    turned = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([turned.to(x.dtype), rest], -1)
