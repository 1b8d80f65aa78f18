"""A rank's partition of a sequence, and the kernel calls that it requires."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..forms import Form
from ..forms.chunk_pairs import Pair
from ..problem import Problem
from .keys import Keys, Needed, Rows, mask, plan_of
from .layout import chunks_of
from .ring import Messages, Ring


@dataclass(frozen=True)
class Settings:
    """The settings that are the same on all ranks."""

    form: str
    scale: float
    causal: bool
    window: int | None
    tolerance: float
    backend: str
    may_skip: bool

    @property
    def half_tolerance(self) -> float:
        """The fraction of the mass that may be skipped among a chunk's own keys, and the fraction
        that may be skipped among the keys of all other chunks together."""
        return self.tolerance / 2

    def pairs(self, rank: int, ranks: int, n: int) -> list[Pair]:
        """Returns the pairs of a rank's query chunks and other key chunks, without those that are
        masked by causality."""
        chunks = range(2 * ranks)
        settings = n, len(chunks), self.causal, self.window
        pairs = [Pair(q, k, *settings) for q in chunks_of(rank, ranks) for k in chunks if q != k]
        return [pair for pair in pairs if pair.is_past or not self.causal]


class Partition:
    """The tensors of this rank: chunks r and 2R - 1 - r, of n tokens each. See RingAttention."""

    def __init__(self, q, k, v, form: Form, settings: Settings, ring: Ring):
        self.q, self.form, self.settings, self.ring = q, form, settings, ring
        self.n = q.shape[2] // 2
        # A form that is not per token has the values of all keys.
        self.state = form.state if form.per_token else None
        self.keys = Keys(Rows(chunks_of(ring.rank, ring.size), self.n), k, v, self.state)

    def own_pairs(self) -> list[Pair]:
        """Returns the pairs of each chunk with itself."""
        settings = self.n, 2 * self.ring.size, self.settings.causal, self.settings.window
        return [Pair(chunk, chunk, *settings) for chunk in self.keys.rows.chunks]

    def problem(self, pair: Pair, keys: Keys, plan: Tensor | None) -> Problem:
        """Returns the problem of a pair for the kernels."""
        settings, q = self.settings, self.q[:, :, self.keys.rows.of(pair.query_chunk)]
        k, v, _ = keys.of(pair.key_chunk)
        form = self.queries(pair).for_pair(pair, self.states(pair, keys))
        tolerance = settings.half_tolerance if settings.may_skip else 0.0
        return Problem(
            q,
            k,
            v,
            form,
            pair.batched_geometry(q.shape[0], q.device),
            settings.scale,
            tolerance,
            settings.backend,
            plan,
        )

    def queries(self, pair: Pair) -> Form:
        """Returns the form restricted to the pair's queries."""
        return self.form.for_queries(self.queries_of(pair))

    def queries_of(self, pair: Pair) -> slice:
        """Returns the pair's queries among those that the form was lowered for."""
        if self.form.spans_sequence:
            return slice(pair.query_chunk * pair.n, (pair.query_chunk + 1) * pair.n)
        return self.keys.rows.of(pair.query_chunk)

    def states(self, pair: Pair, keys: Keys) -> tuple[Tensor, Tensor] | None:
        """Returns the states of the pair's queries and keys, or None if the form has none."""
        if self.state is None:
            return None
        return self.keys.of(pair.query_chunk)[2], keys.of(pair.key_chunk)[2]

    def _plan(self, pair: Pair, taken: Tensor) -> Tensor | None:
        """Returns the plan of key ranges (B, Hkv, 2), or None if they include all keys."""
        if (taken == torch.tensor([0, self.n])).all():
            return None
        return plan_of(taken.to(self.q.device), pair, self.q.shape[1])

    def hops(self, needed: list[Needed]) -> Iterator[tuple[int, Keys | None]]:
        """Yields the number of each hop and the keys received in it, or None. Hop 0 has this rank's
        keys.

        While one hop is processed, the keys of the next one are in flight.
        """
        pending = self._begin(1, needed)
        yield 0, self.keys
        for hop in range(1, self.ring.size):
            arrived, pending = pending, self._begin(hop + 1, needed)
            yield hop, arrived.wait()

    def pairs(
        self, needed: list[Needed], keys: Keys | None
    ) -> Iterator[tuple[Pair, Tensor | None]]:
        """Yields the pairs of this rank that need some of the keys, and their plans."""
        if keys is None:
            return
        for pair, taken in needed[self.ring.rank].items():
            if pair.key_chunk in keys.rows.chunks and (taken[..., 0] < taken[..., 1]).any():
                yield pair, self._plan(pair, taken)

    def key_mask(self, needed: list[Needed], to: int, of: int) -> Tensor | None:
        """Returns the mask of the keys of rank `of` that rank `to` needs, (B, Hkv, 2n), or None."""
        rows = Rows(chunks_of(of, self.ring.size), self.n)
        return mask(needed[to], rows, self.q.device)

    def _has_visible_keys(self, rank: int) -> bool:
        """Returns whether the mask makes any keys of another rank visible to this rank."""
        ranks = self.ring.size
        pairs = self.settings.pairs(self.ring.rank, ranks, self.n)
        return any(
            pair.key_chunk in chunks_of(rank, ranks) and pair.visible_keys != (0, 0)
            for pair in pairs
        )

    def _begin(self, hop: int, needed: list[Needed]) -> PendingKeys | None:
        ring = self.ring
        if hop >= ring.size:
            return None
        outgoing, incoming, source = [], [], ring.source(hop)
        requested = self.key_mask(needed, ring.target(hop), ring.rank)
        if requested is not None:
            outgoing = self.keys.tensors(requested)
        needed_mask = self.key_mask(needed, ring.rank, source)
        if needed_mask is not None:
            incoming = self.keys.empty_tensors(needed_mask)
            ring.traffic.hops += 1
        elif self._has_visible_keys(source):
            ring.traffic.dropped_hops += 1
        messages = ring.begin(hop, outgoing, incoming)
        return PendingKeys(self, messages, source, needed_mask, incoming)


@dataclass
class PendingKeys:
    """Keys in flight from another rank; none if needed_mask is None."""

    partition: Partition
    messages: Messages
    source: int
    needed_mask: Tensor | None
    tensors: list[Tensor]

    def wait(self) -> Keys | None:
        self.messages.wait()
        if self.needed_mask is None:
            return None
        keys, ranks = self.partition.keys, self.partition.ring.size
        received = keys.received(self.source, ranks, self.needed_mask, self.tensors)
        self.tensors.clear()
        return received
