"""LayoutLMv3: a bias of the positions and places of words and patches, one for all layers."""

from __future__ import annotations

from torch import Tensor
from transformers.models.layoutlmv3 import modeling_layoutlmv3

from ...biases import DenseBias
from .layer import FusedLayer


class FusedLayoutLMv3SelfAttention(FusedLayer, modeling_layoutlmv3.LayoutLMv3SelfAttention):
    """LayoutLMv3's attention layer. The bias depends on the page, so it is dense by nature."""

    trunk = modeling_layoutlmv3.LayoutLMv3Model

    def forward(self, hidden_states: Tensor, attention_mask=None, position_bias=None, **kwargs):
        if position_bias is not None:
            position_bias = DenseBias(position_bias)
        return super().forward(hidden_states, attention_mask, position_bias, **kwargs)
