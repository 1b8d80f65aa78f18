"""The ranks agree on which keys of other ranks each of them needs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..chunk_pairs import Pair
from .keys import Needed
from .layout import chunks_of
from .selection import KnownKeys, Queries, ranges
from .share import Share


def agree(share: Share, lse: Tensor) -> list[Needed]:
    """What each rank's pairs take of the chunks that are not their own.

    lse (B, H, 2n): that of this rank's queries over their own chunks. Without a tolerance, or a
    bias, all ranks know it without asking.
    """
    ring, settings = share.ring, share.settings
    pairs = [settings.pairs(rank, ring.size, share.n) for rank in range(ring.size)]
    if not settings.may_skip:
        shape = share.keys.k.shape[:2]
        return [
            {pair: torch.tensor(pair.seen_keys).expand(*shape, 2) for pair in of_rank}
            for of_rank in pairs
        ]
    known = everyones_keys(share)
    asked = torch.stack([_range(share, pair, known, lse) for pair in pairs[ring.rank]])
    everyones = ring.gather(asked.int(), "requests for keys")
    return [
        dict(zip(of_rank, x.long().cpu(), strict=True))
        for of_rank, x in zip(pairs, everyones, strict=True)
    ]


def everyones_keys(share: Share) -> dict[int, KnownKeys]:
    """What is known of the keys of each chunk."""
    ring = share.ring
    own = [KnownKeys.of(*share.keys.of(chunk)) for chunk in share.keys.rows.chunks]
    packed = ring.gather(torch.stack([x.packed() for x in own]), "bounds of their keys")
    return {
        chunk: own[0].unpacked(numbers)
        for rank, of_rank in enumerate(packed)
        for chunk, numbers in zip(chunks_of(rank, ring.size), of_rank, strict=True)
    }


def _range(share: Share, pair: Pair, known: dict[int, KnownKeys], lse: Tensor) -> Tensor:
    """(B, Hkv, 2), on the device of the keys."""
    if pair.seen_keys == (0, 0):
        return torch.zeros((*share.keys.k.shape[:2], 2), dtype=torch.int64, device=lse.device)
    at = share.keys.rows.of(pair.query_chunk)
    group = share.q.shape[1] // share.keys.k.shape[1]
    queries = Queries(
        share.q[:, :, at],
        lse[..., at],
        known[pair.query_chunk].longest.repeat_interleave(group, 1),
        share.queries(pair),
        share.keys.of(pair.query_chunk)[2],
        share.settings.scale,
    )
    return ranges(pair, queries, known[pair.key_chunk], share.settings.half)
