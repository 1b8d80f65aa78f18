"""MPT: distances including padding, times slopes in MPT's own order of heads."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.mpt import modeling_mpt
from transformers.models.mpt.modeling_mpt import MptAttention, MptBlock, build_mpt_alibi_tensor

from .attend import attend, check_dropout
from .biases import Slopes, bias_of_keys
from .layer import FusedLayer
from .token_mask import TokenMask


class FusedMptBlock(FusedLayer, MptBlock):
    """MPT's block, which tells its attention layer in the unused place of the bias whether to
    return weights: nothing else that it passes on could."""

    trunk = modeling_mpt.MptModel

    def forward(self, *args, position_bias: Tensor, output_attentions: bool = False, **kwargs):
        return super().forward(*args, position_bias=output_attentions, **kwargs)


class FusedMptAttention(FusedLayer, MptAttention):
    """MPT's attention layer with fused attention between its projections."""

    trunk = modeling_mpt.MptModel

    def prepare(self) -> None:
        alibi = build_mpt_alibi_tensor(self.n_heads, 2, device="cpu")
        self.slopes = Slopes(-alibi[:, 0, 0])

    def restore(self) -> None:
        del self.slopes

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: bool,
        cache=None,
        attention_mask=None,
        **_,
    ):
        check_dropout(self, self.attn_dropout_p)
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        q, k, v = qkv.unflatten(2, (3, self.n_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        o, _, weights = attend(
            attention_mask,
            q,
            k,
            v,
            self._bias(attention_mask),
            self.softmax_scale,
            with_weights=position_bias,
        )
        return self.out_proj(o.flatten(2)), weights

    def _bias(self, mask: TokenMask):
        """The slopes or, for masks with holes, which packing removes, a bias of keys."""
        if not isinstance(mask, TokenMask) or not mask.has_holes:
            return self.slopes
        position = torch.arange(mask.n_key, dtype=torch.float64, device=mask.tokens.device)
        values = self.slopes.slopes.to(position.device)[:, None] * position
        return bias_of_keys(values.expand(mask.tokens.shape[0], -1, -1), mask)
