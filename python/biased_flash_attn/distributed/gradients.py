"""The gradients of RingAttention, and the way home for those of others' keys."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import operators
from ..chunk_pairs import Pair
from .keys import Keys, Needed, of_any_head
from .ring import Messages
from .share import Share


class KeyGradients:
    """Of the keys and values of some rank, in float32 at least, and of its running sums."""

    def __init__(self, keys: Keys):
        self.rows, real = keys.rows, torch.promote_types(keys.k.dtype, torch.float32)
        self.k, self.v = (torch.zeros_like(x, dtype=real) for x in (keys.k, keys.v))
        self.sums = None if keys.sums is None else torch.zeros_like(keys.sums)

    def tensors(self, shown: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Of the keys that a message held."""
        tensors = [self.k[shown].to(dtype), self.v[shown].to(dtype)]
        if self.sums is not None:
            tensors.append(self.sums[..., of_any_head(shown)])
        return tensors

    def add(self, shown: Tensor, tensors: list[Tensor]) -> None:
        self.k[shown] += tensors[0]
        self.v[shown] += tensors[1]
        if self.sums is not None:
            self.sums[..., of_any_head(shown)] += tensors[2]


class Gradients:
    """Those of this rank's tensors. trained: also of the form's.

    o and lse are those over all keys: with them, each pair of chunks has its own part of every
    gradient, which depends on no other (DESIGN.md, "Gradients").
    """

    def __init__(self, share: Share, grad_o, grad_lse, o, lse, trained: bool):
        self.share, self.trained = share, trained
        self.results = o, lse, grad_o, grad_lse
        self.of_q = torch.zeros_like(share.q, dtype=lse.dtype)
        self.of_keys = KeyGradients(share.keys)
        self.of_form = [torch.zeros_like(x) for x in share.form.tensors]

    def add_own_chunks(self, plans: dict[Pair, Tensor | None]) -> None:
        for pair, plan in plans.items():
            self._add(pair, self.share.keys, self.of_keys, plan)

    def add_other_chunks(self, needed: list[Needed]) -> None:
        share, returning = self.share, Returning(self, needed)
        for hop, keys in share.hops(needed):
            of_keys = self.of_keys
            if hop > 0:
                of_keys = None if keys is None else KeyGradients(keys)
            for pair, plan in share.pairs(needed, keys):
                self._add(pair, keys, of_keys, plan)
            if hop > 0:
                returning.begin(hop, of_keys)
        returning.arrive()

    def of_inputs(self, wanted: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        """Of q, k, v and, where wanted, of the form's tensors."""
        share, keys = self.share, self.of_keys
        q, k, v = share.q, share.keys.k, share.keys.v
        of_form = [
            (keys.sums if x is share.form.state else grad) if wants else None
            for x, grad, wants in zip(share.form.tensors, self.of_form, wanted, strict=True)
        ]
        return self.of_q.to(q.dtype), keys.k.to(k.dtype), keys.v.to(v.dtype), *of_form

    def _add(self, pair: Pair, keys: Keys, of_keys: KeyGradients, plan: Tensor | None) -> None:
        share = self.share
        queries, at = share.keys.rows.of(pair.query_chunk), keys.rows.of(pair.key_chunk)
        results = [x[:, :, queries] for x in self.results]
        of_q, of_k, of_v, of_form = operators.backward(
            share.problem(pair, keys, plan), *results, self.trained
        )
        self.of_q[:, :, queries] += of_q
        of_keys.k[:, :, at] += of_k
        of_keys.v[:, :, at] += of_v
        if of_form:
            self._add_to_form(pair, keys, of_keys, of_form)

    def _add_to_form(self, pair: Pair, keys: Keys, of_keys: KeyGradients, grads) -> None:
        """From the tensors of a pair's form on to those that they were made from."""
        share = self.share
        tensors = [x.detach().requires_grad_() for x in share.form.tensors]
        states = [x.detach().requires_grad_() for x in share.states(pair, keys) or ()]
        queries = share.keys.rows.of(pair.query_chunk)
        with torch.enable_grad():
            form = share.form.with_tensors(tensors).of_queries(queries)
            made = form.of_pair(pair, states or None).tensors
        found = torch.autograd.grad(made, [*tensors, *states], grads, materialize_grads=True)
        for total, x in zip(self.of_form, found, strict=False):
            total += x
        if states:
            of_query_state, of_key_state = found[len(tensors) :]
            of_keys.sums[..., keys.rows.of(pair.key_chunk)] += of_key_state
            self.of_keys.sums[..., queries] += of_query_state


class Returning:
    """Returns dK and dV to the owning ranks; one hop is complete before the next one begins."""

    def __init__(self, gradients: Gradients, needed: list[Needed]):
        self.gradients, self.needed = gradients, needed
        self.arriving: tuple[Messages, Tensor | None, list[Tensor]] | None = None

    def begin(self, hop: int, of_keys: KeyGradients | None) -> None:
        """Sends home those of keys that came with a hop, and takes in those of one's own."""
        self.arrive()
        share = self.gradients.share
        ring, keys = share.ring, share.keys
        outgoing, incoming = [], []
        if of_keys is not None:
            shown = share.shown(self.needed, ring.rank, ring.source(hop))
            outgoing = [("gradients", x) for x in of_keys.tensors(shown, keys.k.dtype)]
        asked = share.shown(self.needed, ring.target(hop), ring.rank)
        if asked is not None:
            incoming = keys.empty_tensors(asked)
        self.arriving = ring.begin(hop, outgoing, incoming, home=True), asked, incoming

    def arrive(self) -> None:
        if self.arriving is None:
            return
        messages, asked, tensors = self.arriving
        messages.wait()
        if asked is not None:
            self.gradients.of_keys.add(asked, tensors)
        self.arriving = None
