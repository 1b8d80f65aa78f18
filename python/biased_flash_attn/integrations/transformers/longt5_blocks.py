"""LongT5's encoder with transient-global attention: nearby tokens, and sums of blocks of tokens.

The sums have a second table, of distances in blocks. Attention to them is merged with that to
nearby tokens by the lse of both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad
from transformers.models.longt5 import modeling_longt5

from ...biases import RelativeBias
from ...sequences import Sequences
from .biases import BucketTable, Values
from .longt5 import Nearby, NearbyAttention, attended


@dataclass(frozen=True, eq=False)
class NearbyAndBlocks(Nearby):
    """The bias of the sums of blocks too. Tokens after the blocks belong to the last one."""

    values: Values  # of the second table, an embedding of the first layer
    block_of: Tensor  # (B, N) int64, -1 for padding and where there are no blocks
    n_blocks: Tensor  # (B,)
    most_blocks: int  # of this length, without padding


class FusedLongT5TransientGlobalAttention(
    NearbyAttention, modeling_longt5.LongT5TransientGlobalAttention
):
    """Attention to nearby tokens and to the sums of blocks."""

    trunk = modeling_longt5.LongT5Stack

    def tokens(self, mask: Tensor | None, states: Tensor) -> Tensor:
        return states.new_ones(states.shape[:2], dtype=torch.bool) if mask is None else mask.bool()

    def shared(self, tokens: Tensor) -> NearbyAndBlocks | None:
        """None if transformers, which adds fractions, rounds to other blocks, as for size 25."""
        size = self.global_block_size
        block_of, exist = modeling_longt5._make_global_fixed_block_ids(tokens.float(), size)
        n_blocks, places = exist.sum(1), torch.arange(tokens.shape[1], device=tokens.device)
        exact = torch.minimum(places // size, n_blocks[:, None] - 1)
        if (exact != block_of)[tokens].any():
            return None
        nearby, buckets = super().shared(tokens), self.relative_attention_num_buckets
        values = Values(self.global_relative_attention_bias, buckets)
        blocks = block_of.long(), n_blocks, exist.shape[1]
        return NearbyAndBlocks(nearby.table, nearby.sequences, values, *blocks)

    def attention(self, states: Tensor, shared: NearbyAndBlocks) -> Tensor:
        q = self.heads(self.q(states))
        nearby = self.nearby(q, states, shared)
        sums = self.global_input_layer_norm(sums_of_blocks(states, shared))
        k, v = self.heads(self.k(sums)), self.heads(self.v(sums))
        of_blocks, after = self.of_blocks(q, k, v, shared), self.after_blocks(q, k, v, shared)
        # Each query is in one of the calls. In the other, o = 0 and lse = -inf.
        return merged(*nearby, of_blocks[0] + after[0], torch.maximum(of_blocks[1], after[1]))

    def of_blocks(self, q: Tensor, k: Tensor, v: Tensor, shared: NearbyAndBlocks) -> list[Tensor]:
        """Attention of blocks to blocks, with a query head for each place within a block."""
        size, n = self.global_block_size, q.shape[1]
        q = pad(q, (0, 0, 0, 0, 0, -n % size)).unflatten(1, (-1, size))
        q = q.transpose(2, 3).flatten(2, 3)
        count = shared.n_blocks
        sequences = sequences_of(torch.zeros_like(count), count, count, q, k, shared.most_blocks)
        bias = BucketTable(
            self.n_heads * size,
            lambda: shared.values().repeat_interleave(size, 1),
            self.buckets,
        )
        results = attended(q, k, v, bias, sequences)
        folded = (x.unflatten(2, (-1, size)).transpose(2, 3) for x in results)
        return [x.flatten(1, 2)[:, :n] for x in folded]

    def after_blocks(self, q: Tensor, k: Tensor, v: Tensor, shared: NearbyAndBlocks):
        """Attention of the tokens after the blocks, whose biases depend on the key alone."""
        _, _, first, count, _ = shared.sequences.rows.unbind(1)
        begin = torch.maximum(first, self.global_block_size * shared.n_blocks)
        rows = begin, (first + count - begin).clamp(min=0), shared.n_blocks
        d = shared.n_blocks[:, None] - 1 - torch.arange(shared.most_blocks, device=q.device)
        values = embedding(self.buckets(d), shared.values()).transpose(1, 2)[..., None]
        one = values.new_ones(1, 1, 1)
        bias = RelativeBias(key_factors=values, key_tables=one, beyond="last")
        return attended(q, k, v, bias, sequences_of(*rows, q, k, q.shape[1]))


def sums_of_blocks(states: Tensor, shared: NearbyAndBlocks) -> Tensor:
    """(B, blocks, channels), summed in float32."""
    real = torch.promote_types(states.dtype, torch.float32)
    # Tokens of block -1 add to a row that is dropped.
    n_rows = shared.most_blocks + 1
    sums = states.new_zeros(states.shape[0], n_rows, states.shape[2], dtype=real)
    rows = (shared.block_of % n_rows)[..., None].expand_as(states)
    return sums.scatter_add(1, rows, states.to(real))[:, :-1].to(states.dtype)


def sequences_of(
    first: Tensor, n_query: Tensor, n_key: Tensor, q: Tensor, k: Tensor, longest: int
) -> Sequences:
    """Queries from `first` on, and keys from 0 on, of each batch entry; (B,) each."""
    zero, most = torch.zeros_like(first), k.shape[1]
    rows = torch.stack([first, n_query, zero, n_key, zero], 1)
    return Sequences(rows, longest, most, q.shape[1], most, is_packed=False)


def merged(o: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Attention to the keys of both, where the first is not of padding, whose lse is -inf."""
    is_token = lse > -torch.inf
    weight = torch.sigmoid(other_lse.where(is_token, -torch.inf) - lse.where(is_token, 0))
    return torch.lerp(*(x.to(weight.dtype) for x in (o, other)), weight[..., None])
