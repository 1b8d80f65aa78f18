"""The baselines on a GPU: FlexAttention, the backends of SDPA, and dense biases."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.common.implementations import distances, make_bias
from bench.common.layer import Inputs, Training
from biased_flash_attn.cli.flex import captured, score_mod
from biased_flash_attn.forms import Geometry


def flex(inputs: Inputs, bias: str | None, compiled: Callable) -> Training:
    """FlexAttention with the bias as its score_mod; a bias that is not fixed is differentiated."""
    module = make_bias(bias, inputs)
    length, device = inputs.q.shape[2], inputs.q.device
    block_mask = create_block_mask(
        lambda b, h, i, j: i >= j, None, None, length, length, device=device
    )

    @compiled
    def attention(q: Tensor, k: Tensor, v: Tensor, form: str, numbers: tuple[Tensor, ...]):
        return flex_attention(q, k, v, score_mod(form, *numbers), block_mask)

    def numbers() -> tuple[str, tuple[Tensor, ...]]:
        form = module and module(inputs.x).lower(Geometry(length, length), torch.float32, device)
        return captured(form)

    training = Training(inputs, lambda: attention(inputs.q, inputs.k, inputs.v, *given()), module)
    fixed = numbers()
    given = numbers if len(training.leaves) > 3 else lambda: fixed
    return training


def sdpa(inputs: Inputs, backend: SDPBackend) -> Training:
    """One of PyTorch's fused kernels, without any bias: less work than ours."""

    def attend() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=True)

    return Training(inputs, attend)


def sdpa_dense(inputs: Inputs, bias: str, backend: SDPBackend) -> Training:
    """The same with a function of the distance as a precomputed dense bias."""
    length, dtype, device = inputs.q.shape[2], inputs.q.dtype, inputs.q.device
    d, hidden = distances(length, device)
    with torch.no_grad():
        form = make_bias(bias, inputs)(inputs.x).lower(Geometry(length, length), dtype, device)
        mask = torch.empty(1, inputs.q.shape[1], length, length, dtype=dtype, device=device)
        # One head at a time, as more would need several times the memory of the mask.
        for of_head, table in zip(mask[0], form.table[0], strict=True):
            of_head.copy_(table[d.long()]).masked_fill_(hidden, -torch.inf)

    def attend() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, attn_mask=mask)

    return Training(inputs, attend)
