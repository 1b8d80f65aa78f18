"""LongT5's encoder with local attention: T5's table within a radius."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.models.longt5 import modeling_longt5

from ...attention import attend, prepared
from ...sequences import Sequences
from .attend import check_dropout
from .biases import SharedTable, Values
from .layer import FusedLayer
from .t5 import TableOfDistances
from .token_mask import TokenMask


@dataclass(frozen=True, eq=False)
class Nearby:
    """The bias of nearby tokens, which the first layer creates for all, and where tokens are."""

    table: SharedTable
    sequences: Sequences


class NearbyAttention(FusedLayer):
    """A layer of an encoder whose tokens see those within a radius.

    It keeps its own attention, which is one of blocks, if there is padding between tokens, if all
    texts share a mask, or if attention weights, which it returns by blocks, are asked for.
    """

    buckets = TableOfDistances.buckets

    def forward(self, hidden_states, mask=None, position_bias=None, output_attentions=False):
        if self.has_relative_attention_bias and position_bias is None and not output_attentions:
            tokens = self.tokens(mask, hidden_states)
            of_batch = tokens.shape == hidden_states.shape[:2]
            if of_batch and not TokenMask.from_keys(tokens).has_holes:
                position_bias = self.shared(tokens)
        if not isinstance(position_bias, Nearby):
            return super().forward(hidden_states, mask, position_bias, output_attentions)
        check_dropout(self, self.dropout)
        o = self.attention(hidden_states, position_bias)
        return self.o(o.flatten(2).to(hidden_states.dtype)), position_bias

    def shared(self, tokens: Tensor) -> Nearby | None:
        """Queries are moved by the radius, so that a window of past keys is both sides of each."""
        radius = self.local_radius
        values = Values(self.relative_attention_bias, self.relative_attention_num_buckets)
        table = SharedTable(self.n_heads, values, lambda d: self.buckets(d - radius))
        sequences = Sequences.from_mask(tokens, tokens.shape[1])
        return Nearby(table, sequences.shifted(radius, radius))

    def nearby(self, q: Tensor, states: Tensor, shared: Nearby) -> tuple[Tensor, Tensor]:
        k, v = self.heads(self.k(states)), self.heads(self.v(states))
        window = 2 * self.local_radius + 1
        return attended(q, k, v, shared.table, shared.sequences, window)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.n_heads, -1))


class FusedLongT5LocalAttention(NearbyAttention, modeling_longt5.LongT5LocalAttention):
    """Local attention, whose mask is one of blocks and their neighbours."""

    trunk = modeling_longt5.LongT5Stack

    def tokens(self, mask: Tensor, states: Tensor) -> Tensor:
        """Tokens are those that see themselves."""
        own = mask[:, 0].diagonal(self.block_len, -2, -1)
        return own.flatten(1)[:, : states.shape[1]]

    def attention(self, states: Tensor, shared: Nearby) -> Tensor:
        return self.nearby(self.heads(self.q(states)), states, shared)[0]


def attended(q, k, v, bias, sequences: Sequences, window: int | None = None):
    """o (B, N, H, D) and lse (B, N, H) from tensors (B, N, H, D); T5 does not scale logits."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options = window is not None, window, 1.0, None, None
    o, lse = attend(prepared(q, k, v, bias, *options, sequences=sequences))
    return o.transpose(1, 2), lse.transpose(1, 2)
