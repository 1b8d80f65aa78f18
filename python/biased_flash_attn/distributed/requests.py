"""Determines which keys of other ranks each rank needs, and exchanges the requests."""

from __future__ import annotations

import torch
from torch import Tensor

from ..forms.chunk_pairs import Pair
from .keys import Needed
from .layout import chunks_of
from .partition import Partition
from .selection import KeySummary, Queries, ranges


def exchange_requests(partition: Partition, lse: Tensor) -> list[Needed]:
    """Returns, for each rank, the key ranges that its pairs of different chunks need.

    lse (B, H, 2n): the lse of this rank's queries over their own chunks. Without skipping, the
    ranges follow from the mask, and nothing is exchanged.
    """
    ring, settings = partition.ring, partition.settings
    pairs = [settings.pairs(rank, ring.size, partition.n) for rank in range(ring.size)]
    if not settings.may_skip:
        shape = partition.keys.k.shape[:2]
        return [
            {pair: torch.tensor(pair.visible_keys).expand(*shape, 2) for pair in rank_pairs}
            for rank_pairs in pairs
        ]
    summaries = gather_key_summaries(partition)
    requested = torch.stack([_range(partition, pair, summaries, lse) for pair in pairs[ring.rank]])
    gathered = ring.gather(requested.int(), "requests for keys")
    return [
        dict(zip(rank_pairs, x.long().cpu(), strict=True))
        for rank_pairs, x in zip(pairs, gathered, strict=True)
    ]


def gather_key_summaries(partition: Partition) -> dict[int, KeySummary]:
    """Returns the summary of the keys of each chunk."""
    ring = partition.ring
    own = [KeySummary.of(*partition.keys.of(chunk)) for chunk in partition.keys.rows.chunks]
    packed = ring.gather(torch.stack([x.packed() for x in own]), "bounds of their keys")
    return {
        chunk: own[0].unpacked(numbers)
        for rank, rank_pairs in enumerate(packed)
        for chunk, numbers in zip(chunks_of(rank, ring.size), rank_pairs, strict=True)
    }


def _range(
    partition: Partition, pair: Pair, summaries: dict[int, KeySummary], lse: Tensor
) -> Tensor:
    """Returns the key range that a pair needs, (B, Hkv, 2), on the device of the keys."""
    if pair.visible_keys == (0, 0):
        return torch.zeros((*partition.keys.k.shape[:2], 2), dtype=torch.int64, device=lse.device)
    at = partition.keys.rows.of(pair.query_chunk)
    group = partition.q.shape[1] // partition.keys.k.shape[1]
    queries = Queries(
        partition.q[:, :, at],
        lse[..., at],
        summaries[pair.query_chunk].largest_norm.repeat_interleave(group, 1),
        partition.queries(pair),
        partition.keys.of(pair.query_chunk)[2],
        partition.settings.scale,
    )
    return ranges(pair, queries, summaries[pair.key_chunk], partition.settings.half_tolerance)
