"""Rotary position embedding (Su et al., "RoFormer", 2021), as flash-attn applies it."""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotates the first 2R channels of x (B, n, heads, D) by the angles of positions (B, n).

    cos and sin are (positions, R). Angle r applies to channels 2r and 2r + 1 if interleaved, else
    to r and r + R. The result is computed in float32 or better and rounded to the dtype of x once.
    """
    r = cos.shape[1]
    real = torch.promote_types(x.dtype, torch.float32)
    c, s = (table[positions].to(real)[:, :, None] for table in (cos, sin))
    rotating, rest = x[..., : 2 * r], x[..., 2 * r :]
    if interleaved:
        a, b = rotating.unflatten(-1, (r, 2)).to(real).unbind(-1)
    else:
        a, b = rotating.to(real).split(r, -1)
    results = a * c - b * s, a * s + b * c
    results = torch.stack(results, -1).flatten(-2) if interleaved else torch.cat(results, -1)
    return torch.cat([results.to(x.dtype), rest], -1)
