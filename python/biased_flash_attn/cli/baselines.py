"""What a user would write without this package: causal attention with a bias of size N x N."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..forms import Cumulative, Geometry, Linear
from .text import Layer


def naive(layer: Layer, bias) -> Tensor:
    """Attention in plain PyTorch, which autograd follows into the parameters of the bias."""
    q, k, v = layer.q, layer.k, layer.v
    s = q @ k.mT * q.shape[-1] ** -0.5 + dense_bias(bias, q.shape[2]).to(q.dtype)
    return s.masked_fill(~visible(q.shape[2]), -torch.inf).softmax(-1) @ v


def sdpa(layer: Layer, mask: Tensor) -> Tensor:
    """PyTorch's fused attention, which takes a bias as a dense mask and leaves it fixed."""
    return F.scaled_dot_product_attention(layer.q, layer.k, layer.v, attn_mask=mask)


def dense_mask(bias, dtype: torch.dtype, length: int) -> Tensor:
    """A bias as `sdpa` wants it, (1, H, N, N) with -inf where a key is not visible."""
    with torch.no_grad():
        return dense_bias(bias, length).to(dtype).masked_fill_(~visible(length), -torch.inf)


def dense_bias(bias, length: int) -> Tensor:
    """(1, H or 1, N, N) float32; entries above the diagonal are arbitrary."""
    form = bias.lower(Geometry(length, length), torch.float32, None)
    position = torch.arange(length)
    d = (position[:, None] - position).clamp(min=0)
    if isinstance(form, Linear):
        return -form.slopes[..., None, None] * d
    if isinstance(form, Cumulative):
        sums = form.sums.float()
        beta = sums[..., :, None] - sums[..., None, :]
        beta = beta if form.gain is None else form.gain[..., None] * beta
        return beta if form.kernel is None else -torch.log1p(beta.square())
    return form.table[..., d]


def visible(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril_()
