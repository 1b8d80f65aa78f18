"""What PyTorch offers on a GPU: FlexAttention, the backends of SDPA, and dense biases.

FlexAttention is given the numbers that our kernels are given, computed by the same formulas, so
that it is written at its best: one lookup a pair for any function of the distance.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from biased_flash_attn.forms import Distance, Geometry, Linear
from layer import Inputs, Training
from sides import distances, make_bias


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
        if module is None:
            return "none", ()
        return captured(module(inputs.x).lower(Geometry(length, length), torch.float32, device))

    training = Training(inputs, lambda: attention(inputs.q, inputs.k, inputs.v, *given()), module)
    fixed = numbers()
    given = numbers if len(training.leaves) > 3 else lambda: fixed
    return training


def captured(form) -> tuple[str, tuple[Tensor, ...]]:
    """The name of a form, and the tensors that its score_mod reads."""
    # In copies: views lose their gradients where the call is compiled (torch 2.13), and a tensor
    # that is read at two places has none.
    if isinstance(form, Linear):
        return form.name, (form.slopes[0].clone(),)
    if isinstance(form, Distance):
        return form.name, (form.table[0].clone(),)
    gain = () if form.gain is None else (form.gain,)
    return form.name, (form.sums.float(), form.sums.float(), *gain)


def score_mod(form: str, *numbers: Tensor) -> Callable | None:
    if form == "linear":
        (slopes,) = numbers
        return lambda score, b, h, i, j: score - slopes[h] * (i - j)
    if form == "distance":
        (table,) = numbers
        # What the mask hides may not lie outside of the table either.
        return lambda score, b, h, i, j: score + table[h, (i - j).abs()]
    if form == "cumulative":
        of_query, of_key, *gain = numbers
        if not gain:
            return lambda score, b, h, i, j: score + (of_query[b, h, i] - of_key[b, h, j])
        g = gain[0]
        return lambda score, b, h, i, j: score + g[b, h, i] * (of_query[b, h, i] - of_key[b, h, j])
    return None


def sdpa(inputs: Inputs, backend: SDPBackend) -> Training:
    """One of PyTorch's fused kernels, without any bias: less work than ours."""

    def attend() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=True)

    return Training(inputs, attend)


def sdpa_dense(inputs: Inputs, bias: str, backend: SDPBackend) -> Training:
    """The same, given a function of the distance as a dense bias, which is made before."""
    length, dtype, device = inputs.q.shape[2], inputs.q.dtype, inputs.q.device
    d, hidden = distances(length, device)
    with torch.no_grad():
        form = make_bias(bias, inputs)(inputs.x).lower(Geometry(length, length), dtype, device)
        mask = torch.empty(1, inputs.q.shape[1], length, length, dtype=dtype, device=device)
        # A head at a time, as more would need several times the memory of the mask.
        for of_head, table in zip(mask[0], form.table[0], strict=True):
            of_head.copy_(table[d.long()]).masked_fill_(hidden, -torch.inf)

    def attend() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, attn_mask=mask)

    return Training(inputs, attend)
