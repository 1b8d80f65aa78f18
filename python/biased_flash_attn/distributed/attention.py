"""Attention of this rank's queries to everyone's keys, hop by hop, in both directions.

At every hop a rank is sent those of another rank's keys that can matter to it, computes what its
queries take of them, and merges it by lse. Its own keys come first. Backward does the same, and
sends the gradients of keys home.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..skipping import FEWEST_KEYS
from .agreement import agree
from .gradients import Gradients
from .keys import Keys, Needed
from .pairs import Pair
from .ring import Ring
from .share import Problem, Share


class RingAttention(torch.autograd.Function):
    """o and lse of q (B, H, 2n, D), k and v: of each, chunk r before chunk 2R - 1 - r.

    terms are slopes, the table of all distances of the sequence, or this rank's running sums, which
    go on from those of earlier chunks; gain (B or 1, H or 1, 2n).
    """

    @staticmethod
    def forward(ctx, q, k, v, terms, gain, problem: Problem, ring: Ring):
        share = Share(q, k, v, terms, gain, problem, ring)
        merged = Merged(share)
        plans = merged.add_own_chunks()
        needed = agree(share, merged.lse.clone())
        merged.add_other_chunks(needed)
        o, lse = merged.o.to(q.dtype), merged.lse
        ctx.problem, ctx.ring, ctx.needed, ctx.plans = problem, ring, needed, plans
        ctx.save_for_backward(q, k, v, terms, gain, o, lse)
        return o, lse

    @staticmethod
    def backward(ctx, grad_o, grad_lse):
        *tensors, o, lse = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:5]
        with torch.no_grad():
            share = Share(*tensors, ctx.problem, ctx.ring)
            gradients = Gradients(share, grad_o, grad_lse, o, lse, any(wanted))
            gradients.add_own_chunks(ctx.plans)
            gradients.add_other_chunks(ctx.needed)
            of_inputs = gradients.of_inputs(wanted)
        if torch.is_grad_enabled():
            of_inputs = [
                None if x is None else Constant.apply(x, grad_o, grad_lse, *tensors)
                for x in of_inputs
            ]
        return *of_inputs, None, None


class Constant(torch.autograd.Function):
    """A gradient, and an error for who differentiates it by what it was computed from."""

    @staticmethod
    def forward(ctx, gradient: Tensor, *computed_from: Tensor | None) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("context_parallel_attention has no second derivatives")


class Merged:
    """o (B, H, 2n, Dv) and lse (B, H, 2n) over the keys so far, in float32 at least."""

    def __init__(self, share: Share):
        q, v = share.q, share.keys.v
        real = torch.promote_types(q.dtype, torch.float32)
        self.share = share
        self.o = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=real)
        self.lse = q.new_full(q.shape[:3], -torch.inf, dtype=real)

    def add_own_chunks(self) -> dict[Pair, Tensor | None]:
        """Those of each chunk's queries with its keys, and the plans by which some are left out."""
        plans = {}
        for pair in self.share.own_pairs():
            plans[pair] = self._plan(pair)
            self._add(pair, self.share.keys, plans[pair])
        return plans

    def add_other_chunks(self, needed: list[Needed]) -> None:
        for _, keys in self.share.hops(needed):
            for pair, plan in self.share.pairs(needed, keys):
                self._add(pair, keys, plan)

    def _plan(self, pair: Pair) -> Tensor | None:
        """The ordinary one."""
        share, problem = self.share, self.share.problem
        if not problem.may_skip or share.n < FEWEST_KEYS:
            return None
        form, terms, gain = share.bias(pair, share.keys)
        options = form, problem.scale, *pair.mask, problem.half, problem.backend
        return ops.plan(*share.tensors(pair, share.keys), terms, gain, *options)

    def _add(self, pair: Pair, keys: Keys, plan: Tensor | None) -> None:
        share, problem = self.share, self.share.problem
        q, k, v = share.tensors(pair, keys)
        form, terms, gain = share.bias(pair, keys)
        options = form, problem.scale, *pair.mask, plan, problem.backend
        new_o, new_lse = ops.forward(
            *(q, k, v, terms, gain, *options), *pair.sequences(q.shape[0], q.device)
        )
        at = share.keys.rows.of(pair.query_chunk)
        o, lse = self.o[:, :, at], self.lse[..., at]
        both = torch.logaddexp(lse, new_lse)
        kept, added = (
            torch.where(x == -torch.inf, 0, (x - both).exp())[..., None] for x in (lse, new_lse)
        )
        o.mul_(kept).add_(new_o * added)
        lse.copy_(both)
