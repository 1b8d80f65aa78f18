"""The backward pass of RingAttention, which returns dK and dV to the owning rank."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import operators
from ..forms.chunk_pairs import Pair
from .keys import Keys, Needed, any_head
from .partition import Partition
from .ring import Messages


class KeyGradients:
    """The gradients of a rank's keys and values, in at least float32, and of its prefix sums."""

    def __init__(self, keys: Keys):
        self.rows, real = keys.rows, torch.promote_types(keys.k.dtype, torch.float32)
        self.k, self.v = (torch.zeros_like(x, dtype=real) for x in (keys.k, keys.v))
        self.sums = None if keys.sums is None else torch.zeros_like(keys.sums)

    def tensors(self, selected: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Returns the gradients of the selected keys, to be sent in a message."""
        tensors = [self.k[selected].to(dtype), self.v[selected].to(dtype)]
        if self.sums is not None:
            tensors.append(self.sums[..., any_head(selected)])
        return tensors

    def add(self, selected: Tensor, tensors: list[Tensor]) -> None:
        self.k[selected] += tensors[0]
        self.v[selected] += tensors[1]
        if self.sums is not None:
            self.sums[..., any_head(selected)] += tensors[2]


class Gradients:
    """Accumulates the gradients of this rank's tensors and, if trained, of the form's tensors.

    results: o, pivot, log_sum, grad_o and grad_lse. The first three are those over all keys, so
    that each pair of chunks contributes to the gradients independently of the others (DESIGN.md,
    "Gradients").
    """

    def __init__(self, partition: Partition, results: tuple[Tensor, ...], trained: bool):
        self.partition, self.trained = partition, trained
        self.results = results
        real = torch.promote_types(partition.q.dtype, torch.float32)
        self.grad_q = torch.zeros_like(partition.q, dtype=real)
        self.key_gradients = KeyGradients(partition.keys)
        self.grad_form = [torch.zeros_like(x) for x in partition.form.tensors]

    def add_own_chunks(self, plans: dict[Pair, Tensor | None]) -> None:
        for pair, plan in plans.items():
            self._add(pair, self.partition.keys, self.key_gradients, plan)

    def add_other_chunks(self, needed: list[Needed]) -> None:
        partition, gradient_return = self.partition, GradientReturn(self, needed)
        for hop, keys in partition.hops(needed):
            key_gradients = self.key_gradients
            if hop > 0:
                key_gradients = None if keys is None else KeyGradients(keys)
            for pair, plan in partition.pairs(needed, keys):
                self._add(pair, keys, key_gradients, plan)
            if hop > 0:
                gradient_return.begin(hop, key_gradients)
        gradient_return.arrive()

    def input_gradients(self, wanted: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        """Returns the gradients of q, k, v and of those of the form's tensors that are `wanted`."""
        partition, keys = self.partition, self.key_gradients
        q, k, v = partition.q, partition.keys.k, partition.keys.v
        grad_form = [
            (keys.sums if x is partition.state else grad) if wants else None
            for x, grad, wants in zip(partition.form.tensors, self.grad_form, wanted, strict=True)
        ]
        return self.grad_q.to(q.dtype), keys.k.to(k.dtype), keys.v.to(v.dtype), *grad_form

    def _add(
        self, pair: Pair, keys: Keys, key_gradients: KeyGradients, plan: Tensor | None
    ) -> None:
        partition = self.partition
        queries, at = partition.keys.rows.of(pair.query_chunk), keys.rows.of(pair.key_chunk)
        results = [x[:, :, queries] for x in self.results]
        grad_q, grad_k, grad_v, grad_form = operators.backward(
            partition.problem(pair, keys, plan), *results, self.trained
        )
        self.grad_q[:, :, queries] += grad_q
        key_gradients.k[:, :, at] += grad_k
        key_gradients.v[:, :, at] += grad_v
        if grad_form:
            self._add_to_form(pair, keys, key_gradients, grad_form)

    def _add_to_form(self, pair: Pair, keys: Keys, key_gradients: KeyGradients, grads) -> None:
        """Propagates gradients of the tensors of a pair's form to the tensors of the whole form."""
        partition = self.partition
        tensors = [x.detach().requires_grad_() for x in partition.form.tensors]
        states = [x.detach().requires_grad_() for x in partition.states(pair, keys) or ()]
        queries = partition.keys.rows.of(pair.query_chunk)
        with torch.enable_grad():
            form = partition.form.with_tensors(tensors).for_queries(partition.queries_of(pair))
            made = form.for_pair(pair, states or None).tensors
        found = torch.autograd.grad(made, [*tensors, *states], grads, materialize_grads=True)
        for total, x in zip(self.grad_form, found, strict=False):
            total += x
        if states:
            grad_query_state, grad_key_state = found[len(tensors) :]
            key_gradients.sums[..., keys.rows.of(pair.key_chunk)] += grad_key_state
            self.key_gradients.sums[..., queries] += grad_query_state


class GradientReturn:
    """Returns dK and dV to the owning ranks; one hop is complete before the next one begins."""

    def __init__(self, gradients: Gradients, needed: list[Needed]):
        self.gradients, self.needed = gradients, needed
        self.pending: tuple[Messages, Tensor | None, list[Tensor]] | None = None

    def begin(self, hop: int, key_gradients: KeyGradients | None) -> None:
        """Returns the gradients of the keys received in a hop, and receives those of this rank's
        keys."""
        self.arrive()
        partition = self.gradients.partition
        ring, keys = partition.ring, partition.keys
        outgoing, incoming = [], []
        if key_gradients is not None:
            selected = partition.key_mask(self.needed, ring.rank, ring.source(hop))
            outgoing = [("gradients", x) for x in key_gradients.tensors(selected, keys.k.dtype)]
        requested = partition.key_mask(self.needed, ring.target(hop), ring.rank)
        if requested is not None:
            incoming = keys.empty_tensors(requested)
        self.pending = ring.begin(hop, outgoing, incoming, returning=True), requested, incoming

    def arrive(self) -> None:
        if self.pending is None:
            return
        messages, requested, tensors = self.pending
        messages.wait()
        if requested is not None:
            self.gradients.key_gradients.add(requested, tensors)
        self.pending = None
