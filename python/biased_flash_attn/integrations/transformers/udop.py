"""UDOP: T5's table in the decoder, and in the encoder a bias of the places of words on a page."""

from __future__ import annotations

from torch import Tensor
from transformers.models.udop import modeling_udop

from ...biases import DenseBias
from .t5 import TableOfDistances


class FusedUdopAttention(TableOfDistances, modeling_udop.UdopAttention):
    """UDOP's attention layer. The encoder's bias depends on the page, so it is dense by nature."""

    trunk = modeling_udop.UdopStack

    def forward(self, hidden_states: Tensor, position_bias=None, **kwargs):
        if isinstance(position_bias, Tensor):
            position_bias = DenseBias(position_bias)
        return super().forward(hidden_states, position_bias=position_bias, **kwargs)
