"""The range of attention: the nearest keys that hold all but a fraction of its weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..attention import prepared
from ..biases.receptive_field import check_fraction
from ..geometry import Geometry
from ..nn import FusedAttention
from .modules import evaluating, logits_of

ENTRIES = 2**22  # weights that are computed at once, or one row if it has more


@torch.no_grad()
def attention_mass(
    q: Tensor,
    k: Tensor,
    bias=None,
    eps: float = 0.01,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """n_emp(eps) of each query, (B, H, Nq) int64 (Qin et al., 2023, section 3.3).

    It is the smallest number of nearest keys that hold more than a fraction 1 - eps of the causal
    attention weights, which unlike the theoretical receptive field include the products q.k. They
    are computed for one block of queries at a time, in O(Nk) memory.

    Args:
        q: (B, H, Nq, D), with Nq <= Nk. It and the arguments that are not listed here are as in
            `biased_flash_attn`.
        eps: the fraction that may be missing, in (0, 1).

    Raises TypeError or ValueError, naming the argument.
    """
    check_fraction("eps", eps)
    call = prepared(q, k, k, bias, True, window, scale, None, "reference")
    n_query, n_key = call.geometry.n_query, call.geometry.n_key
    if n_query > n_key:
        raise ValueError(f"q has {n_query} queries; it may have as many as k has keys, {n_key}")
    keys = call.k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    rows = max(1, ENTRIES // max(1, q.shape[0] * q.shape[1] * n_key))
    fields = [torch.empty((*q.shape[:2], 0), dtype=torch.int64, device=q.device)]
    for first in range(0, n_query, rows):
        end = min(first + rows, n_query)
        seen = n_key - n_query + end
        logits = call.scale * call.q[:, :, first:end].double() @ keys[:, :, :seen].double().mT
        geometry = Geometry(end - first, seen, True, window)
        form = call.form.for_queries(slice(first, end)).for_keys(slice(0, seen))
        logits = logits + form.dense(geometry).to(logits.device)
        visible = geometry.visible(q.device)
        from_farthest = logits.masked_fill_(~visible, -torch.inf).softmax(-1).cumsum(-1)
        fields.append(((from_farthest >= eps) & visible).sum(-1))
    return torch.cat(fields, -1)


def attention_masses(model: nn.Module, inputs: Tensor, eps: float = 0.01) -> dict[str, Tensor]:
    """n_emp(eps) of each query in every attention layer of a model, by the layer's name.

    Layers are the `nn.FusedAttention` modules that the model calls, for example those of
    `nn.BiasedAttention`; each gives (B, H, N) int64. See `attention_mass`.

    Args:
        model: from tokens (B, N), or embeddings (B, N, dim), to logits (B, N, vocabulary); it is
            evaluated in evaluation mode.
        inputs: tokens or embeddings.
        eps: the fraction that may be missing, in (0, 1).

    Raises TypeError or ValueError, naming the argument.
    """
    check_fraction("eps", eps)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, FusedAttention)}
    if not layers:
        raise ValueError("model has no nn.FusedAttention; call attention_mass on its q and k")
    if not all(layer.causal for layer in layers.values()):
        raise ValueError("model is bidirectional; n_emp is defined for causal attention")
    fields: dict[str, Tensor] = {}

    def measure(name: str):
        def hook(layer: FusedAttention, arguments: tuple, options: dict) -> None:
            (q, k, _, bias), scale = arguments, options.get("scale")
            fields[name] = attention_mass(q, k, bias, eps, window=layer.window, scale=scale)

        return hook

    hooks = [
        layer.register_forward_pre_hook(measure(name), with_kwargs=True)
        for name, layer in layers.items()
    ]
    try:
        with evaluating(model) as device, torch.no_grad():
            logits_of(model, inputs.to(device))
    finally:
        for hook in hooks:
            hook.remove()
    return fields
