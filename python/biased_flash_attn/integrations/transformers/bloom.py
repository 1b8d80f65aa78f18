"""BLOOM: distances in tokens, without padding, times slopes in float32."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.bloom import modeling_bloom
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor, dropout_add

from .attend import attend, check_dropout
from .biases import Slopes
from .layer import FusedLayer


class FusedBloomAttention(FusedLayer, BloomAttention):
    """BLOOM's attention layer with fused attention between its projections.

    The bias that BLOOM computes is not used, because in bfloat16 it rounds positions above 256.
    """

    trunk = modeling_bloom.BloomModel

    def prepare(self) -> None:
        one = torch.tensor([[1, 1]], device="cpu")
        self.slopes = Slopes(build_alibi_tensor(one, self.num_heads, torch.float32)[:, 0, 1])

    def restore(self) -> None:
        del self.slopes

    @staticmethod
    def refusal(layer: BloomAttention) -> str | None:
        if layer.pretraining_tp > 1 and layer.slow_but_exact:
            return "slow_but_exact projections in slices are not supported"
        return None

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask,
        layer_past=None,
        output_attentions: bool = False,
        **_,
    ):
        check_dropout(self, self.attention_dropout.p)
        qkv = self.query_key_value(hidden_states)
        qkv = qkv.unflatten(2, (self.num_heads, 3, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.unbind(3)
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        o, _, weights = attend(
            attention_mask,
            q,
            k,
            v,
            self.slopes,
            self.inv_norm_factor,
            with_weights=output_attentions,
        )
        projected = self.dense(o.flatten(2))
        return dropout_add(projected, residual, self.hidden_dropout, self.training), weights
