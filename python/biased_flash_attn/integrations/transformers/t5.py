"""T5 and models with its layers: a table over the distance instead of a dense position bias."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.longt5 import modeling_longt5
from transformers.models.mt5 import modeling_mt5
from transformers.models.pop2piano import modeling_pop2piano
from transformers.models.t5 import modeling_t5
from transformers.models.umt5 import modeling_umt5

from .biases import SharedTable, Values
from .layer import FusedLayer


class _NoTable:
    """A placeholder for layers without a bias, whose weight transformers can initialize."""

    def __init__(self):
        self.weight = torch.empty(0)


class TableOfDistances(FusedLayer):
    """A layer whose bias is a `SharedTable`, which transformers passes on to the call.

    The first layer of a stack creates it for the others; each layer of UMT5 has its own.
    Cross-attention has none.
    """

    def prepare(self) -> None:
        if not self.has_relative_attention_bias:
            # Otherwise the layer would create a dense bias of zeros and not call compute_bias.
            self.has_relative_attention_bias = True
            self.relative_attention_bias = _NoTable()

    def restore(self) -> None:
        if isinstance(self.relative_attention_bias, _NoTable):
            self.has_relative_attention_bias = False
            del self.relative_attention_bias

    def compute_bias(self, *_, **__) -> SharedTable | None:
        if isinstance(self.relative_attention_bias, _NoTable):
            return None
        values = Values(self.relative_attention_bias, self.relative_attention_num_buckets)
        return SharedTable(self.n_heads, values, self.buckets)

    def buckets(self, d: Tensor) -> Tensor:
        """Calls transformers, whose rounding of logarithms determines the edges of buckets."""
        return self._relative_position_bucket(
            -d,
            bidirectional=not self.is_decoder,
            num_buckets=self.relative_attention_num_buckets,
            max_distance=self.relative_attention_max_distance,
        )


class FusedT5Attention(TableOfDistances, modeling_t5.T5Attention):
    """T5's attention layer, without a dense bias."""

    trunk = modeling_t5.T5Stack
    removes_padding = True


class FusedMT5Attention(TableOfDistances, modeling_mt5.MT5Attention):
    """mT5's attention layer, without a dense bias."""

    trunk = modeling_mt5.MT5Stack
    removes_padding = True


class FusedUMT5Attention(TableOfDistances, modeling_umt5.UMT5Attention):
    """UMT5's attention layer, without a dense bias."""

    trunk = modeling_umt5.UMT5Stack
    removes_padding = True

    def buckets(self, d: Tensor) -> Tensor:
        return self._relative_position_bucket(-d)


class FusedPop2PianoAttention(TableOfDistances, modeling_pop2piano.Pop2PianoAttention):
    """Pop2Piano's attention layer, without a dense bias."""

    trunk = modeling_pop2piano.Pop2PianoStack
    removes_padding = True


class FusedLongT5Attention(TableOfDistances, modeling_longt5.LongT5Attention):
    """The attention layer of LongT5's decoder, without a dense bias."""

    trunk = modeling_longt5.LongT5Stack
