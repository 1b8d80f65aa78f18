"""The implementations that benchmarks compare: this package and the baselines."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.common.layer import DIM, Inputs, Training
from biased_flash_attn import biased_flash_attn, biases
from biased_flash_attn.nn.named_biases import make


class Given(biases.Bias):
    """A bias of hidden states with precomputed steps and gain, which are trained."""

    def __init__(self, bias: biases.CumulativeBias):
        super().__init__()
        self.steps = nn.Parameter(bias.steps.detach().clone())
        self.gain = None if bias.gain is None else nn.Parameter(bias.gain.detach().clone())
        self.kernel = bias.kernel

    def forward(self, x=None, q=None, k=None) -> biases.CumulativeBias:
        return biases.CumulativeBias(self.steps, self.gain, self.kernel)


class Fixed(biases.Bias):
    """A fixed bias of fixed hidden states, which is lowered once."""

    def __init__(self, bias: nn.Module, x: Tensor):
        super().__init__()
        self.bias = bias.requires_grad_(False)(x)
        self.lower = cache(self.bias.lower)
        self.dense = self.bias.dense

    def forward(self, x=None, q=None, k=None) -> Fixed:
        return self


def make_bias(name: str | None, inputs: Inputs) -> nn.Module | None:
    """The bias `name` with reproducible parameters, to be called on hidden states.

    "NAME, given steps" is the bias NAME without the layers from hidden states to steps and gain,
    "NAME, fixed" the bias NAME with precomputed inputs of the kernels, and "alibi, trained" ALiBi
    with trained slopes.
    """
    if name is None:
        return None
    torch.manual_seed(0)
    name, _, variant = name.partition(", ")
    heads, device = inputs.q.shape[1], inputs.q.device
    if (name, variant) == ("alibi", "trained"):
        return biases.ALiBi(heads, trainable=True).to(device)
    bias = make(biases.NAMED[name], heads, DIM).to(device)
    if variant == "given steps":
        return Given(bias(inputs.x))
    return Fixed(bias, inputs.x) if variant == "fixed" else bias


def ours(
    inputs: Inputs, bias: str | None, backend: str = "cpu", tolerance: float | None = None
) -> Training:
    """Our call, including everything that is computed from hidden states and parameters."""
    module = make_bias(bias, inputs)
    q, k, v = inputs.q, inputs.k, inputs.v

    def attend() -> Tensor:
        form = module and module(inputs.x)
        return biased_flash_attn(q, k, v, form, tolerance=tolerance, backend=backend)

    return Training(inputs, attend, module)


def plain_pytorch(inputs: Inputs, bias: str) -> Training:
    """A bias as in its formula, with precomputed distances and mask."""
    module = make_bias(bias, inputs)
    q, k, v, scale = inputs.q, inputs.k, inputs.v, inputs.q.shape[3] ** -0.5
    d, hidden = distances(q.shape[2], q.device)

    def attend() -> Tensor:
        s = (scale * q) @ k.mT + FORMULAS[bias](module(inputs.x), d).to(q.dtype)
        return s.masked_fill_(hidden, -torch.inf).softmax(-1) @ v

    return Training(inputs, attend, module)


def kerple_log(bias: biases.KerpleLog, d: Tensor) -> Tensor:
    r1, r2 = (parameter[:, None, None] for parameter in (bias.r1, bias.r2))
    return -r1 * torch.log1p(r2 * d)


def fire(bias: biases.FIRE, d: Tensor) -> Tensor:
    """As in the paper's listing: the network is evaluated on every pair."""
    length = (bias.L_multiplier * bias.init_L).abs()
    longest = torch.maximum(torch.arange(len(d), device=d.device), length)[:, None]
    x = torch.log((bias.c * d).abs() + 1) / (torch.log((bias.c * longest).abs() + 1) + 1e-6)
    return bias.mlp(x[..., None]).permute(2, 0, 1)


FORMULAS = {"kerple_log": kerple_log, "fire": fire}


def sdpa_with_dense_mask(inputs: Inputs, bias: str) -> Training:
    """PyTorch's fused attention with the bias as a precomputed mask (HEADS, N, N)."""
    length = inputs.q.shape[2]
    with torch.no_grad():
        mask = make_bias(bias, inputs)(inputs.x).dense(length, length).to(inputs.q.dtype)
    mask = mask.masked_fill_(distances(length, mask.device)[1], -torch.inf)[None]

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, attn_mask=mask)

    return Training(inputs, attend)


def sdpa_without_bias(inputs: Inputs, bias: str) -> Training:
    """PyTorch's fused attention without any bias: less work than ours."""

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=True)

    return Training(inputs, attend)


def distances(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """i - j, 0 above the diagonal, (length, length) float32; and whether j is hidden from i."""
    position = torch.arange(length, device=device)
    d = position[:, None] - position
    return d.clamp(min=0).float(), d < 0
