"""Falcon with ALiBi: a bias per key, rounded to bfloat16 and added before scaling."""

from __future__ import annotations

from torch import Tensor
from transformers.models.falcon import modeling_falcon
from transformers.models.falcon.modeling_falcon import FalconAttention

from .attend import attend, check_dropout
from .biases import bias_of_keys
from .layer import FusedLayer


class FusedFalconAttention(FusedLayer, FalconAttention):
    """Falcon's attention layer with fused attention between its projections.

    The bias is Falcon's own, whose rounding to bfloat16 is part of the model. It is added once, as
    with attn_implementation="sdpa"; transformers' "eager" adds it twice.
    """

    trunk = modeling_falcon.FalconModel

    @staticmethod
    def refusal(layer: FalconAttention) -> str | None:
        if not layer.config.alibi:
            return "Falcon without ALiBi has rotary embeddings and no bias"
        return None

    def forward(
        self,
        hidden_states: Tensor,
        alibi: Tensor,
        attention_mask,
        layer_past=None,
        output_attentions: bool = False,
        **_,
    ):
        check_dropout(self, self.attention_dropout.p)
        heads = self._split_heads(self.query_key_value(hidden_states))
        q, k, v = (x.transpose(1, 2) for x in heads)
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        values = alibi.double().view(q.shape[0], self.num_heads, -1) * self.inv_norm_factor
        bias = bias_of_keys(values, attention_mask)
        o, _, weights = attend(
            attention_mask, q, k, v, bias, self.inv_norm_factor, with_weights=output_attentions
        )
        return self.dense(o.flatten(2)), weights
