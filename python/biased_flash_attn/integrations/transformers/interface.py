"""This package's attention in the registries of transformers."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.falcon.modeling_falcon import FALCON_ATTENTION_CLASSES, FalconAttention

from ...backends.protocol import MAX_HEAD_DIM_ON_GPUS
from .attend import attend, check_dropout
from .biases import SharedTable
from .token_mask import TokenMask, create_token_mask

# transformers treats names that contain "flash" as packages.
NAME = "biased_attention"

# Unsupported arguments that change the result. Others do not affect attention.
_REFUSED = (
    *("softcap", "s_aux", "sinks", "head_mask", "indices", "block_indices"),
    *("cu_seq_lens_q", "cu_seq_lens_k"),
)


def register() -> None:
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, create_token_mask)
    # For a Falcon that is created with the config of an accelerated one.
    FALCON_ATTENTION_CLASSES[NAME] = FalconAttention


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: TokenMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_bias: SharedTable | None = None,
    output_attentions: bool | None = False,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """The `AttentionInterface` of this package; transformers documents the arguments.

    query (B, H, Nq, D), key and value (B, Hkv, Nk, D); returns (B, Nq, H, D) and, with
    output_attentions, the weights (B, H, Nq, Nk), which take O(N^2) memory.

    Raises NotImplementedError for unsupported features, ValueError for inconsistent windows.
    """
    check_dropout(module, dropout)
    if isinstance(position_bias, Tensor):
        raise NotImplementedError(
            "position_bias is a dense tensor, which is not supported; pass models of the T5 and"
            " Inkling families to biased_flash_attn.integrations.transformers.accelerate"
        )
    refuse(kwargs)
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if sliding_window is not None and not causal:
            raise NotImplementedError(
                "sliding_window is given without is_causal, which is not supported"
            )
        plain = position_bias is None and not (causal or output_attentions)
        if plain and query.shape[3] > MAX_HEAD_DIM_ON_GPUS:
            # Tokens of Inkling 2 attend to their own hidden states in earlier layers.
            return sdpa_attention_forward(module, query, key, value, None, scaling=scaling)
        attention_mask = TokenMask(query.shape[2], key.shape[2], causal, sliding_window)
    elif sliding_window is not None and sliding_window != getattr(attention_mask, "window", None):
        raise ValueError(f"sliding_window is {sliding_window}, which the mask does not have")
    o, _, weights = attend(
        attention_mask,
        query,
        key,
        value,
        position_bias,
        scaling,
        counts_padding=position_bias is not None,
        with_weights=output_attentions,
    )
    return o.contiguous(), weights


def refuse(kwargs: dict) -> None:
    """Raises NotImplementedError for unsupported arguments."""
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{name} is given, which {NAME} does not support")
    # That of continuous batching is none of a model's caches.
    if not isinstance(kwargs.get("cache"), Cache | None):
        raise NotImplementedError(f"cache is paged, which {NAME} does not support")
