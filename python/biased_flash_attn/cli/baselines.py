"""Baselines without this package: causal attention with an N x N bias."""

import os

import torch
from torch import Tensor
from torch.nn import functional as F

from ..biases import Bias
from ..forms import Cumulative, Geometry, Linear, Normalized, Relative
from ..nn.named_biases import applied
from .text import Layer


def naive(module: Bias, layer: Layer) -> Tensor:
    """Attention in plain PyTorch, differentiable with respect to the parameters of the bias."""
    q, bias, scale = applied(module, layer.x, layer.q, layer.k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    geometry = Geometry(q.shape[2], layer.k.shape[2])
    s = (q * scale) @ layer.k.mT + dense_bias(bias, geometry).to(q.dtype)
    return s.masked_fill_(~geometry.visible(), -torch.inf).softmax(-1) @ layer.v


def sdpa(layer: Layer, mask: Tensor) -> Tensor:
    """PyTorch's fused attention with the bias as a fixed dense mask."""
    return F.scaled_dot_product_attention(layer.q, layer.k, layer.v, attn_mask=mask)


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
    if isinstance(form, Relative):
        return relative_bias(form, d)
    return form.table[..., d]


def relative_bias(form: Relative, d: Tensor) -> Tensor:
    """Selects by the distances d of pairs from the products with the vectors of all distances."""
    u, p, w, q = form.tensors
    column = d.clamp(max=form.n_columns - 1)
    bias = torch.zeros(())
    if u.shape[-1]:
        bias = (u @ p).gather(-1, column.expand(*u.shape[:2], -1, -1))
    if w.shape[-1]:
        bias = bias + (w @ q).gather(-1, column.mT.expand(*w.shape[:2], -1, -1)).mT
    return bias if form.beyond == "last" else bias.masked_fill(d > column, 0)
