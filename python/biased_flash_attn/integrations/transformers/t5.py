"""T5, mT5 and UMT5: a table over the distance instead of a dense position bias."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.mt5 import modeling_mt5
from transformers.models.t5 import modeling_t5
from transformers.models.umt5 import modeling_umt5

from .biases import SharedTable


class _NoTable:
    """A placeholder for layers without a bias, whose weight transformers can initialize."""

    def __init__(self):
        self.weight = torch.empty(0)


class _TableOfDistances:
    """A layer whose bias is a `SharedTable`, which transformers passes on to the call.

    The first layer of T5 and mT5 creates it for the others; each layer of UMT5 has its own.
    Cross-attention has none.
    """

    def prepare(self) -> None:
        if not self.has_relative_attention_bias:
            # Otherwise the layer would create a dense bias of zeros and not call compute_bias.
            self.has_relative_attention_bias = True
            self.relative_attention_bias = _NoTable()

    @staticmethod
    def refusal(layer: nn.Module) -> str | None:
        return None

    def compute_bias(self, *_, **__) -> SharedTable | None:
        if isinstance(self.relative_attention_bias, _NoTable):
            return None
        return SharedTable(self.relative_attention_bias.weight, self.buckets)

    def buckets(self, d: Tensor) -> Tensor:
        """Calls transformers, whose rounding of logarithms determines the edges of buckets."""
        return self._relative_position_bucket(
            -d,
            bidirectional=not self.is_decoder,
            num_buckets=self.relative_attention_num_buckets,
            max_distance=self.relative_attention_max_distance,
        )


class FusedT5Attention(_TableOfDistances, modeling_t5.T5Attention):
    """T5's attention layer, without a dense bias."""

    trunk = modeling_t5.T5Stack


class FusedMT5Attention(_TableOfDistances, modeling_mt5.MT5Attention):
    """mT5's attention layer, without a dense bias."""

    trunk = modeling_mt5.MT5Stack


class FusedUMT5Attention(_TableOfDistances, modeling_umt5.UMT5Attention):
    """UMT5's attention layer, without a dense bias."""

    trunk = modeling_umt5.UMT5Stack

    def buckets(self, d: Tensor) -> Tensor:
        return self._relative_position_bucket(-d)
