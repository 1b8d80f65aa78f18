"""What a rank has of a sequence, and the calls of the kernels that this takes part in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..chunk_pairs import Pair
from ..forms import Form
from ..problem import Problem
from .keys import Keys, Needed, Rows, mask, plan_of
from .layout import chunks_of
from .ring import Messages, Ring


@dataclass(frozen=True)
class Settings:
    """What all ranks agree on, but for tensors."""

    form: str
    scale: float
    causal: bool
    window: int | None
    tolerance: float
    backend: str
    may_skip: bool

    @property
    def half(self) -> float:
        """What chunks may leave out of their own keys; and, together, of all other chunks'."""
        return self.tolerance / 2

    def pairs(self, rank: int, ranks: int, n: int) -> list[Pair]:
        """A rank's queries with the other chunks' keys, as far as causality shows them."""
        chunks = range(2 * ranks)
        settings = n, len(chunks), self.causal, self.window
        pairs = [Pair(q, k, *settings) for q in chunks_of(rank, ranks) for k in chunks if q != k]
        return [pair for pair in pairs if pair.is_past or not self.causal]


class Share:
    """Tensors of this rank, of a chunk r and a chunk 2R - 1 - r of n tokens: see RingAttention."""

    def __init__(self, q, k, v, form: Form, settings: Settings, ring: Ring):
        self.q, self.form, self.settings, self.ring = q, form, settings, ring
        self.n = q.shape[2] // 2
        self.keys = Keys(Rows(chunks_of(ring.rank, ring.size), self.n), k, v, form.state)

    def own_pairs(self) -> list[Pair]:
        """Each chunk with itself."""
        settings = self.n, 2 * self.ring.size, self.settings.causal, self.settings.window
        return [Pair(chunk, chunk, *settings) for chunk in self.keys.rows.chunks]

    def problem(self, pair: Pair, keys: Keys, plan: Tensor | None) -> Problem:
        """That of a pair, as the kernels know it."""
        settings, q = self.settings, self.q[:, :, self.keys.rows.of(pair.query_chunk)]
        k, v, _ = keys.of(pair.key_chunk)
        form = self.queries(pair).of_pair(pair, self.states(pair, keys))
        tolerance = settings.half if settings.may_skip else 0.0
        return Problem(
            *(q, k, v, form, pair.placed(q.shape[0], q.device)),
            *(settings.scale, tolerance, settings.backend, plan),
        )

    def queries(self, pair: Pair) -> Form:
        """The form with what it has of the pair's queries."""
        return self.form.of_queries(self.keys.rows.of(pair.query_chunk))

    def states(self, pair: Pair, keys: Keys) -> tuple[Tensor, Tensor] | None:
        """Those of the pair's queries and of its keys."""
        if self.form.state is None:
            return None
        return self.keys.of(pair.query_chunk)[2], keys.of(pair.key_chunk)[2]

    def _plan(self, pair: Pair, taken: Tensor) -> Tensor | None:
        """That of a range (B, Hkv, 2) of keys, if it is not all of them."""
        if (taken == torch.tensor([0, self.n])).all():
            return None
        return plan_of(taken.to(self.q.device), pair, self.q.shape[1])

    def hops(self, needed: list[Needed]) -> Iterator[tuple[int, Keys | None]]:
        """The number of a hop, and the keys that arrive with it: at first those of this rank.

        Those of the next hop are on their way meanwhile. Some hops bring none.
        """
        coming = self._begin(1, needed)
        yield 0, self.keys
        for hop in range(1, self.ring.size):
            arrived, coming = coming, self._begin(hop + 1, needed)
            yield hop, arrived.wait()

    def pairs(
        self, needed: list[Needed], keys: Keys | None
    ) -> Iterator[tuple[Pair, Tensor | None]]:
        """Those of this rank that take some of the keys, and the plan of which."""
        if keys is None:
            return
        for pair, taken in needed[self.ring.rank].items():
            if pair.key_chunk in keys.rows.chunks and (taken[..., 0] < taken[..., 1]).any():
                yield pair, self._plan(pair, taken)

    def shown(self, needed: list[Needed], to: int, of: int) -> Tensor | None:
        """Which keys of one rank another takes, (B, Hkv, 2n), or None."""
        rows = Rows(chunks_of(of, self.ring.size), self.n)
        return mask(needed[to], rows, self.q.device)

    def _sees(self, rank: int) -> bool:
        """Whether the mask shows this rank some keys of another."""
        ranks = self.ring.size
        pairs = self.settings.pairs(self.ring.rank, ranks, self.n)
        return any(
            pair.key_chunk in chunks_of(rank, ranks) and pair.seen_keys != (0, 0) for pair in pairs
        )

    def _begin(self, hop: int, needed: list[Needed]) -> Arriving | None:
        ring = self.ring
        if hop >= ring.size:
            return None
        outgoing, incoming, source = [], [], ring.source(hop)
        asked = self.shown(needed, ring.target(hop), ring.rank)
        if asked is not None:
            outgoing = self.keys.tensors(asked)
        wanted = self.shown(needed, ring.rank, source)
        if wanted is not None:
            incoming = self.keys.empty_tensors(wanted)
            ring.traffic.hops += 1
        elif self._sees(source):
            ring.traffic.dropped_hops += 1
        messages = ring.begin(hop, outgoing, incoming)
        return Arriving(self, messages, source, wanted, incoming)


@dataclass
class Arriving:
    """Keys on their way from another rank; none, where wanted is None."""

    share: Share
    messages: Messages
    source: int
    wanted: Tensor | None
    tensors: list[Tensor]

    def wait(self) -> Keys | None:
        self.messages.wait()
        if self.wanted is None:
            return None
        keys, ranks = self.share.keys, self.share.ring.size
        received = keys.received(self.source, ranks, self.wanted, self.tensors)
        self.tensors.clear()
        return received
