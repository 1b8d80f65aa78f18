"""Ring attention: attention of this rank's queries to the keys of all ranks, hop by hop.

At each hop, a rank receives the keys of another rank that it needs, computes its queries' attention
to them, and merges the results by lse. It starts with its own keys. Backward proceeds in the same
way, and returns the gradients of keys to their owning rank.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import operators
from ..forms import from_tensors
from ..forms.chunk_pairs import Pair
from .gradients import Gradients
from .keys import Keys, Needed
from .partition import Partition, Settings
from .requests import exchange_requests
from .ring import Ring


class RingAttention(torch.autograd.Function):
    """Computes o and lse of q (B, H, 2n, D), k and v, each of which holds chunk r before chunk
    2R - 1 - r.

    form_tensors: the tensors of the bias lowered for the whole sequence; per-token tensors are
    those of this rank's tokens, with prefix sums that include the earlier chunks.
    """

    @staticmethod
    def forward(ctx, settings: Settings, ring: Ring, q, k, v, *form_tensors):
        partition = Partition(q, k, v, from_tensors(settings.form, form_tensors), settings, ring)
        merged = MergedOutput(partition)
        plans = merged.add_own_chunks()
        needed = exchange_requests(partition, merged.lse)
        merged.add_other_chunks(needed)
        o, lse = merged.o.to(q.dtype), merged.lse
        softmax = merged.pivot, merged.log_sum
        ctx.settings, ctx.ring, ctx.needed, ctx.plans = settings, ring, needed, plans
        ctx.save_for_backward(o, *softmax, q, k, v, *form_tensors)
        return o, lse

    @staticmethod
    def backward(ctx, grad_o, grad_lse):
        o, pivot, log_sum, *tensors = ctx.saved_tensors
        q, k, v, *form_tensors = tensors
        wanted = ctx.needs_input_grad[5:]
        with torch.no_grad():
            form = from_tensors(ctx.settings.form, form_tensors)
            partition = Partition(q, k, v, form, ctx.settings, ctx.ring)
            results = o, pivot, log_sum, grad_o, grad_lse
            gradients = Gradients(partition, results, any(wanted))
            gradients.add_own_chunks(ctx.plans)
            gradients.add_other_chunks(ctx.needed)
            grad_inputs = gradients.input_gradients(wanted)
        if torch.is_grad_enabled():
            grad_inputs = [
                None if x is None else Constant.apply(x, grad_o, grad_lse, *tensors)
                for x in grad_inputs
            ]
        return None, None, *grad_inputs


class Constant(torch.autograd.Function):
    """Returns a gradient unchanged, and raises an error if it is differentiated."""

    @staticmethod
    def forward(ctx, gradient: Tensor, *computed_from: Tensor | None) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("context_parallel_attention has no second derivatives")


class MergedOutput:
    """Accumulates o (B, H, 2n, Dv) and lse (B, H, 2n) over the keys so far, in at least float32.
    pivot and log_sum are those of a `KernelBackend`."""

    def __init__(self, partition: Partition):
        q, v = partition.q, partition.keys.v
        real = torch.promote_types(q.dtype, torch.float32)
        self.partition = partition
        self.o = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=real)
        self.pivot = q.new_full(q.shape[:3], -torch.inf, dtype=real)
        self.log_sum = self.pivot.clone()

    @property
    def lse(self) -> Tensor:
        return ((self.pivot.double() + self.log_sum) * math.log(2)).to(self.pivot.dtype)

    def add_own_chunks(self) -> dict[Pair, Tensor | None]:
        """Adds the attention of each chunk to itself, and returns the plans that were used."""
        made = {}
        for pair in self.partition.own_pairs():
            made[pair] = self._plan(pair)
            self._add(pair, self.partition.keys, made[pair])
        return made

    def add_other_chunks(self, needed: list[Needed]) -> None:
        for _, keys in self.partition.hops(needed):
            for pair, plan in self.partition.pairs(needed, keys):
                self._add(pair, keys, plan)

    def _plan(self, pair: Pair) -> Tensor | None:
        """Returns the plan of an ordinary call, if it is worthwhile."""
        problem = self.partition.problem(pair, self.partition.keys, None)
        return operators.planned(problem).plan

    def _add(self, pair: Pair, keys: Keys, plan: Tensor | None) -> None:
        new_o, _, *new = operators.forward(self.partition.problem(pair, keys, plan))
        at = self.partition.keys.rows.of(pair.query_chunk)
        o, pivot, log_sum = self.o[:, :, at], self.pivot[..., at], self.log_sum[..., at]
        highest = torch.maximum(pivot, new[0])
        sums = [
            torch.where(own_sum == -torch.inf, own_sum, own - highest + own_sum)
            for own, own_sum in ((pivot, log_sum), new)
        ]
        both = torch.logaddexp2(*sums)
        kept, added = (torch.where(x == -torch.inf, 0, (x - both).exp2())[..., None] for x in sums)
        o.mul_(kept).add_(new_o * added)
        pivot.copy_(highest)
        log_sum.copy_(both)
