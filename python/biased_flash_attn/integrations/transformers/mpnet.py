"""MPNet: a two-sided table over the distance, evaluated once for all layers."""

from __future__ import annotations

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.mpnet import modeling_mpnet

from .attend import attend, check_dropout, check_mask
from .biases import SharedTable, Values
from .layer import FusedLayer
from .token_mask import TokenMask


class FusedMPNetEncoder(FusedLayer, modeling_mpnet.MPNetEncoder):
    """MPNet's encoder, without a dense bias and without computation for padding.

    Layers other than attention treat each token by itself, so they too get only tokens.
    """

    trunk = modeling_mpnet.MPNetModel

    def compute_position_bias(self, *_, **__) -> SharedTable:
        n = self.config.relative_attention_num_buckets
        values = Values(self.relative_attention_bias, n)
        return SharedTable(self.n_heads, values, lambda d: self.relative_position_bucket(-d))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: TokenMask,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        return_dict: bool = False,
        **kwargs,
    ):
        check_mask(attention_mask, hidden_states.shape[1], hidden_states.shape[1])
        every_layer = output_attentions or output_hidden_states
        if every_layer or not attention_mask.has_removable_padding:
            returned = (output_attentions, output_hidden_states, return_dict)
            return super().forward(hidden_states, attention_mask, *returned, **kwargs)
        rows = attention_mask.unpadded.packed.keys
        tokens = rows.pack(hidden_states)
        states = rows.unpack(super().forward(tokens, attention_mask.unpadded, **kwargs)[0])
        return BaseModelOutput(last_hidden_state=states) if return_dict else (states,)


class FusedMPNetSelfAttention(FusedLayer, modeling_mpnet.MPNetSelfAttention):
    """MPNet's attention layer with fused attention between its projections."""

    trunk = modeling_mpnet.MPNetModel

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask=None,
        position_bias: SharedTable | None = None,
        output_attentions: bool = False,
        **_,
    ):
        check_dropout(self, self.dropout.p)
        size = self.attention_head_size
        q, k, v = (
            project(hidden_states).unflatten(2, (-1, size)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        o, _, weights = attend(
            attention_mask,
            q,
            k,
            v,
            position_bias,
            size**-0.5,
            counts_padding=True,
            with_weights=output_attentions,
        )
        o = self.o(o.flatten(2))
        return (o, weights) if output_attentions else (o,)
