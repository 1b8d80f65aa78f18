"""Inkling and Inkling 2: profiles of the distance that each query mixes, and attention sinks."""

from __future__ import annotations

from functools import wraps

import torch
from torch import Tensor
from transformers.models.inkling import modeling_inkling
from transformers.models.inkling2 import modeling_inkling2

from ...biases import RelativeBias
from ...biases.banded import log_scaling
from .attend import attend, check_dropout
from .layer import ACCELERATED, FusedLayer


class FusedInklingAttention(FusedLayer, modeling_inkling.InklingAttention):
    """Inkling's attention layer, without a dense bias."""

    trunk = modeling_inkling.InklingTextModel

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask,
        conv_mask: Tensor | None = None,
        cache=None,
        output_attentions: bool = False,
        **_,
    ):
        check_dropout(self, self.attention_dropout)
        context = {"cache": cache, "conv_mask": conv_mask}
        q = self.q_norm(self._heads(self.q_proj(hidden_states)))
        k = self.k_norm(self._heads(self.k_sconv(self.k_proj(hidden_states), **context)))
        v = self._heads(self.v_sconv(self.v_proj(hidden_states), **context))
        factors = self.r_proj(hidden_states).unflatten(2, (self.num_heads, -1))
        if not self.is_sliding and self.config.log_scaling_n_floor is not None:
            positions = torch.arange(q.shape[1], device=q.device)
            if cache is not None:
                positions = positions + cache.get_query_offset(self.layer_idx)
            q, factors = (self._scaled(x, positions) for x in (q, factors))
        q, k, v, factors = (x.transpose(1, 2) for x in (q, k, v, factors))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        o, _, weights = attend(
            attention_mask,
            q,
            k,
            v,
            RelativeBias(factors, self.rel_logits_proj.proj[None]),
            self.scaling,
            counts_padding=True,
            with_weights=output_attentions,
        )
        return self.o_proj(o.flatten(2)), weights

    def _heads(self, x: Tensor) -> Tensor:
        """Splits the channels into heads; convolutions leave them strided."""
        return x.contiguous().unflatten(2, (-1, self.head_dim))

    def _scaled(self, x: Tensor, positions: Tensor) -> Tensor:
        """x times the factors that the logits of late queries have, in float32 as in the model."""
        config = self.config
        tau = log_scaling(
            positions, config.log_scaling_n_floor, config.log_scaling_alpha, torch.float32
        )
        return (x.float() * tau[:, None, None]).to(x.dtype)


class FusedInklingDecoderLayer(FusedLayer, modeling_inkling.InklingDecoderLayer):
    """Inkling's decoder layer, which is fused from the start where a model creates others.

    `generate(use_mtp=True)` drafts tokens by layers of the type of the model's last layer.
    """

    trunk = modeling_inkling.InklingTextModel

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.self_attn.__class__ = FusedInklingAttention


def _unless_accelerated(distances):
    """Inkling 2 computes the distances of all pairs, which fused layers do not use."""

    @wraps(distances)
    def computed(*args, **kwargs) -> Tensor | None:
        # Compilers drop what is not used.
        if not torch.compiler.is_compiling() and ACCELERATED.get():
            return None
        return distances(*args, **kwargs)

    return computed


modeling_inkling2.get_relative_distance = _unless_accelerated(
    modeling_inkling2.get_relative_distance
)


class _WithSinks(FusedLayer):
    """What the sliding and the full layers of Inkling 2 share."""

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention_mask,
        position_ids: Tensor,
        key_hidden_states: Tensor | None = None,
        value_hidden_states: Tensor | None = None,
        cache=None,
        conv_mask: Tensor | None = None,
        cache_offset: int = 0,
        output_attentions: bool = False,
        **options,
    ):
        check_dropout(self, self.attention_dropout)
        context = {"cache": cache, "conv_mask": conv_mask, "cache_offset": cache_offset, **options}
        q = self.q_proj(hidden_states, position_ids)
        # Convolutions leave the channels strided.
        k, v = (
            project(hidden_states if states is None else states, **context).contiguous()
            for project, states in (
                (self.k_proj, key_hidden_states),
                (self.v_proj, value_hidden_states),
            )
        )
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx + cache_offset)
        profiles = self.relative_position_bias
        factors = profiles.linear(hidden_states).unflatten(2, (self.num_heads, -1))
        factors = profiles.norm(factors, position_ids).transpose(1, 2)
        o, lse, weights = attend(
            attention_mask,
            q,
            k,
            v,
            RelativeBias(factors, profiles.proj[None]),
            self.scaling,
            counts_padding=True,
            with_weights=output_attentions,
        )
        # A sink is a logit of no key. It leaves exp(lse) / (exp(lse) + exp(sink)) to the keys.
        mass_of_keys = torch.sigmoid(lse - self.sink_proj(hidden_states))
        o = (o * mass_of_keys[..., None]).to(o.dtype)
        if weights is not None:
            weights = weights * mass_of_keys.transpose(1, 2)[..., None].to(weights.dtype)
        return self.o_proj(o.flatten(2), hidden_states), weights


class FusedInkling2SlidingAttention(_WithSinks, modeling_inkling2.Inkling2SlidingAttention):
    """The attention layer of Inkling 2 with a sliding window, without a dense bias."""

    trunk = modeling_inkling2.Inkling2TextModel


class FusedInkling2FullAttention(_WithSinks, modeling_inkling2.Inkling2FullAttention):
    """The attention layer of Inkling 2 without a window, and without a dense bias."""

    trunk = modeling_inkling2.Inkling2TextModel
