"""Inkling and Inkling 2: profiles of the distance that each query mixes, and attention sinks."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn
from transformers.models.inkling import modeling_inkling
from transformers.models.inkling2 import modeling_inkling2

from ...biases import RelativeBias
from ...biases.banded import log_scaling
from .attend import Attended, attend, check_dropout
from .layer import FusedLayer
from .releases import CACHE
from .token_mask import TokenMask


class _MixedProfiles(FusedLayer):
    """A layer whose bias is a product of a vector per query and its profiles of the distance.

    Tensors of heads are (B, N, H, C) up to the cache.
    """

    def _heads(self, x: Tensor) -> Tensor:
        """Splits the channels into heads; convolutions leave them strided."""
        return x.contiguous().unflatten(2, (-1, self.head_dim))

    def _scaled(self, x: Tensor, positions: Tensor) -> Tensor:
        """x times the factors that the logits of late queries have, in float32 as in the model."""
        config = self.config
        tau = log_scaling(
            positions, config.log_scaling_n_floor, config.log_scaling_alpha, torch.float32
        )
        return (x.float() * tau[..., None, None]).to(x.dtype)

    def _attend(
        self,
        mask: TokenMask,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        factors: Tensor,
        cache,
        with_weights: bool | None,
    ) -> Attended:
        q, k, v, factors = (x.transpose(1, 2) for x in (q, k, v, factors))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        bias = RelativeBias(factors, self.rel_logits_proj.proj[None])
        options = {"counts_padding": True, "with_weights": with_weights}
        return attend(mask, q, k, v, bias, self.scaling, **options)


class FusedInklingAttention(_MixedProfiles, modeling_inkling.InklingAttention):
    """Inkling's attention layer, without a dense bias."""

    trunk = modeling_inkling.InklingTextModel

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask,
        conv_mask: Tensor | None = None,
        output_attentions: bool = False,
        **options,
    ):
        check_dropout(self, self.attention_dropout)
        cache = options.get(CACHE)
        context = {CACHE: cache, "conv_mask": conv_mask}
        q = self.q_norm(self._heads(self.q_proj(hidden_states)))
        k = self.k_norm(self._heads(self.k_sconv(self.k_proj(hidden_states), **context)))
        v = self._heads(self.v_sconv(self.v_proj(hidden_states), **context))
        factors = self.r_proj(hidden_states).unflatten(2, (self.num_heads, -1))
        if not self.is_sliding and self.config.log_scaling_n_floor is not None:
            positions = torch.arange(q.shape[1], device=q.device)
            if cache is not None:
                positions = positions + cache.get_query_offset(self.layer_idx)
            q, factors = (self._scaled(x, positions) for x in (q, factors))
        o, _, weights = self._attend(attention_mask, q, k, v, factors, cache, output_attentions)
        return self.o_proj(o.flatten(2)), weights


class _ClippedAndGated(_MixedProfiles):
    """What the sliding and the full layers of Inkling 2 share."""

    @staticmethod
    def refusal(layer: nn.Module) -> str | None:
        if not hasattr(layer, "k_sconv"):
            return (
                f"transformers {transformers.__version__} builds Inkling 2 of other layers; install"
                " 'transformers==5.23.*' for it"
            )
        return None

    def _output(
        self,
        x: Tensor,
        k: Tensor,
        v: Tensor,
        mask,
        cache,
        with_weights: bool,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The result of the layer for hidden states x of queries, and convolved k and v.

        positions are those of x if the logits are scaled by them.
        """
        check_dropout(self, self.attention_dropout)
        q = self.q_l2_clip(self._heads(self.q_proj(x)))
        k, v = self.k_l2_clip(self._heads(k)), self._heads(v)
        v = self.v_norm(v.float()).to(v.dtype)
        factors = self.rel_l2_clip(self.r_proj(x).unflatten(2, (self.num_heads, -1)))
        if positions is not None:
            q, factors = (self._scaled(x, positions) for x in (q, factors))
        o, lse, weights = self._attend(mask, q, k, v, factors, cache, with_weights)
        # A sink is a logit of no key. It leaves exp(lse) / (exp(lse) + exp(sink)) to the keys.
        of_keys = torch.sigmoid(lse - self.sink_proj(x))
        gate = torch.sigmoid(self.gate_proj(x).float())
        gated = (o * of_keys[..., None]).flatten(2) * gate
        if weights is not None:
            weights = weights * of_keys.transpose(1, 2)[..., None].to(weights.dtype)
        return self.o_proj(gated.to(o.dtype)), weights


class FusedInkling2SlidingAttention(_ClippedAndGated, modeling_inkling2.Inkling2SlidingAttention):
    """The attention layer of Inkling 2 with a sliding window, without a dense bias."""

    trunk = modeling_inkling2.Inkling2TextModel

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask,
        conv_mask: Tensor | None = None,
        output_attentions: bool = False,
        **options,
    ):
        cache = options.get(CACHE)
        context = {CACHE: cache, "conv_mask": conv_mask}
        k = self.k_sconv(self.k_proj(hidden_states), **context)
        v = self.v_sconv(self.v_proj(hidden_states), **context)
        call = (attention_mask, cache, output_attentions)
        return self._output(hidden_states, k, v, *call)


class FusedInkling2FullAttention(_ClippedAndGated, modeling_inkling2.Inkling2FullAttention):
    """The attention layer of Inkling 2 without a window, and without a dense bias."""

    trunk = modeling_inkling2.Inkling2TextModel

    def forward(
        self,
        hidden_states: Tensor,
        key_hidden_states: Tensor,
        value_hidden_states: Tensor,
        attention_mask,
        conv_mask: Tensor | None = None,
        output_attentions: bool = False,
        *,
        position_ids: Tensor,
        **options,
    ):
        cache = options.get(CACHE)
        context = {CACHE: cache, "conv_mask": conv_mask}
        k = self.k_sconv(self.k_proj(key_hidden_states), key_hidden_states, **context)
        v = self.v_sconv(self.v_proj(value_hidden_states), value_hidden_states, **context)
        call = (attention_mask, cache, output_attentions, position_ids)
        return self._output(hidden_states, k, v, *call)
