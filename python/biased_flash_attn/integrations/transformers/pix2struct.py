"""Pix2Struct: T5's table in its text decoder, of distances to earlier tokens alone."""

from __future__ import annotations

from torch import Tensor
from transformers.models.pix2struct import modeling_pix2struct

from .t5 import TableOfDistances


class FusedPix2StructTextAttention(TableOfDistances, modeling_pix2struct.Pix2StructTextAttention):
    """The attention layer of Pix2Struct's decoder; that of its image encoder has no bias."""

    trunk = modeling_pix2struct.Pix2StructTextModel

    def buckets(self, d: Tensor) -> Tensor:
        return self._relative_position_bucket(
            -d,
            bidirectional=False,
            num_buckets=self.relative_attention_num_buckets,
            max_distance=self.relative_attention_max_distance,
        )
