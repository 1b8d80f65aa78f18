"""Baselines without this package: causal attention with an N x N bias."""

import os

import torch
from torch import Tensor
from torch.nn import functional as F

from ..forms import Cumulative, Geometry, Linear, Normalized


def naive(q: Tensor, k: Tensor, v: Tensor, bias) -> Tensor:
    """Attention in plain PyTorch, differentiable with respect to the parameters of the bias."""
    geometry = Geometry(q.shape[2], k.shape[2])
    s = (q * q.shape[-1] ** -0.5) @ k.mT + dense_bias(bias, geometry).to(q.dtype)
    return s.masked_fill_(~geometry.visible(), -torch.inf).softmax(-1) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """PyTorch's fused attention with the bias as a fixed dense mask."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def dense_mask(bias, length: int, dtype: torch.dtype) -> Tensor:
    """A bias as a mask for `sdpa`, (1, H, N, N) with -inf where a key is not visible."""
    geometry = Geometry(length, length)
    with torch.no_grad():
        return dense_bias(bias, geometry).to(dtype).masked_fill_(~geometry.visible(), -torch.inf)


def fits_memory(heads: int, length: int, dtype: torch.dtype) -> bool:
    """Whether half of the machine's memory holds the matrices of `naive`."""
    matrices = 6 * heads * length**2 * dtype.itemsize
    return 2 * matrices < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def dense_bias(bias, geometry: Geometry) -> Tensor:
    """(1, H or 1, n_query, n_key) float32, with finite values for invisible pairs."""
    form = bias.lower(geometry, torch.float32, None)
    d = geometry.pair_distances().clamp(min=0)
    if isinstance(form, Linear):
        return -form.slopes[..., None, None] * d
    if isinstance(form, Cumulative):
        sums = form.sums.float()
        beta = sums[..., -geometry.n_query :, None] - sums[..., None, :]
        beta = beta if form.gain is None else form.gain[..., None] * beta
        return beta if form.kernel is None else -torch.log1p(beta.square())
    if isinstance(form, Normalized):
        return form.function(form.gain[..., None] * form.table[..., d])
    return form.table[..., d]
