"""Attention with an additive bias, written out: what every backend has to compute.

    s_ij  = scale * q_i . k_j + b_ij
    o_i   = sum_j exp(s_ij - lse_i) v_j
    lse_i = log sum_j exp(s_ij)             sums over the keys j that query i sees

Non-finite numbers follow IEEE arithmetic through the pairs that are visible, and reach nothing
through the others. A query that sees no key, or only logits of -inf, has o = 0, lse = -inf and
zero gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .forms import Geometry


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, geometry: Geometry, scale: float
) -> tuple[Tensor, Tensor]:
    """Outputs (B, H, n_query, Dv) in q's dtype, and lse (B, H, n_query), float32 at least.

    q (B, H, n_query, D); k (B, Hkv, n_key, D) and v (B, Hkv, n_key, Dv), H a multiple of Hkv;
    bias broadcasts to (B, H, n_query, n_key), or is None. All arithmetic is in q's dtype, so that
    this is also what a faster way has to be as accurate as.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    visible = geometry.visible(q.device)

    s = scale * logits(q, k, visible)
    if bias is not None:
        s = s + bias.to(s.dtype)
    s = torch.where(visible, s, -torch.inf)

    # Results do not depend on m, which only keeps exp in range: its gradient is zero.
    no_key = s.new_full((*s.shape[:3], 1), -torch.inf)
    m = s.amax(-1, keepdim=True).detach() if geometry.n_key else no_key
    sees = m != -torch.inf
    m = torch.where(sees, m, 0)
    p = torch.exp(s - m)
    l = torch.where(sees, p.sum(-1, keepdim=True), 1)  # noqa: E741

    o = mix(p, v, visible & sees) / l
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = torch.where(sees, m.to(wide) + torch.log(l.to(wide)), -torch.inf)
    return o, lse.squeeze(-1)


def logits(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """q k^T, with gradients of q and k that sum over visible pairs only."""
    if all_finite(q, k):
        return q @ k.mT
    # In a matrix product, 0 * NaN of a pair that is not visible would count.
    return (q[..., :, None, :] * k[..., None, :, :].where(visible[..., None], 0)).sum(-1)


def mix(p: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """p v, a sum over visible pairs only, as its gradients are."""
    if all_finite(p, v):
        return p @ v
    return (p[..., :, :, None] * v[..., None, :, :].where(visible[..., None], 0)).sum(-2)


def all_finite(*tensors: Tensor) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def append(pages: Tensor, rows: Tensor, block_table: Tensor, lengths: Tensor) -> None:
    """Writes rows (B, heads, n, ...) into pages (pages, heads, page_size, ...) of a cache.

    They become the last of the keys of each sequence, of which there are `lengths`, (B,) int64.
    """
    keys = lengths[:, None] + torch.arange(-rows.shape[2], 0, device=lengths.device)
    columns = keys // pages.shape[2] % block_table.shape[1]
    page = block_table.gather(1, columns).long()
    pages[page, :, keys % pages.shape[2]] = rows.transpose(1, 2)
