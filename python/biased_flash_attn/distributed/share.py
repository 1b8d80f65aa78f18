"""What a rank has of a sequence, and the calls of the kernels that this takes part in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..forms import Cumulative, Form
from .keys import Keys, Needed, Rows, mask, plan_of
from .layout import chunks_of
from .pairs import Pair
from .ring import Messages, Ring


@dataclass(frozen=True)
class Problem:
    """What all ranks agree on, but for tensors. form is as forms.py names it, or "none"."""

    form: str
    has_sums: bool
    scale: float
    causal: bool
    window: int | None
    tolerance: float
    backend: str

    @staticmethod
    def of(form: Form | None, *settings) -> Problem:
        name = "none" if form is None else form.name
        return Problem(name, isinstance(form, Cumulative), *settings)

    @property
    def half(self) -> float:
        """What chunks may leave out of their own keys; and, together, of all other chunks'."""
        return self.tolerance / 2

    @property
    def may_skip(self) -> bool:
        return self.tolerance > 0 and self.form != "none"

    def pairs(self, rank: int, ranks: int, n: int) -> list[Pair]:
        """A rank's queries with the other chunks' keys, as far as causality shows them."""
        chunks = range(2 * ranks)
        settings = n, len(chunks), self.causal, self.window
        pairs = [Pair(q, k, *settings) for q in chunks_of(rank, ranks) for k in chunks if q != k]
        return [pair for pair in pairs if pair.is_past or not self.causal]


class Share:
    """Tensors of this rank, of a chunk r and a chunk 2R - 1 - r of n tokens: see RingAttention."""

    def __init__(self, q, k, v, terms, gain, problem: Problem, ring: Ring):
        self.q, self.terms, self.gain, self.problem, self.ring = q, terms, gain, problem, ring
        self.n = q.shape[2] // 2
        rows = Rows(chunks_of(ring.rank, ring.size), self.n)
        self.keys = Keys(rows, k, v, terms if problem.has_sums else None)

    def own_pairs(self) -> list[Pair]:
        """Each chunk with itself."""
        settings = self.n, 2 * self.ring.size, self.problem.causal, self.problem.window
        return [Pair(chunk, chunk, *settings) for chunk in self.keys.rows.chunks]

    def tensors(self, pair: Pair, keys: Keys) -> tuple[Tensor, Tensor, Tensor]:
        k, v, _ = keys.of(pair.key_chunk)
        return self.q[:, :, self.keys.rows.of(pair.query_chunk)], k, v

    def bias(self, pair: Pair, keys: Keys) -> tuple[str, Tensor | None, Tensor | None]:
        """The form's name, terms and gain of a pair."""
        form, terms = pair.terms(self.problem.form, self.terms, self.sums(pair, keys))
        at = self.keys.rows.of(pair.query_chunk)
        return form, terms, None if self.gain is None else self.gain[..., at]

    def sums(self, pair: Pair, keys: Keys) -> tuple[Tensor, Tensor] | None:
        """Those of the pair's queries and of its keys."""
        if not self.problem.has_sums:
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
        pairs = self.problem.pairs(self.ring.rank, ranks, self.n)
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
