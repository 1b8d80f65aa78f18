"""Attention of this rank's queries to everyone's keys, hop by hop, in both directions.

At every hop a rank is sent those of another rank's keys that can matter to it, computes what its
queries take of them, and merges it by lse. Its own keys come first. Backward does the same, and
sends the gradients of keys home.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import operators
from ..chunk_pairs import Pair
from ..forms import of_tensors
from ..skipping import plans
from .agreement import agree
from .gradients import Gradients
from .keys import Keys, Needed
from .ring import Ring
from .share import Settings, Share


class RingAttention(torch.autograd.Function):
    """o and lse of q (B, H, 2n, D), k and v: of each, chunk r before chunk 2R - 1 - r.

    form_tensors are those of the bias lowered for the whole sequence or, per token, for this rank's
    tokens behind those of earlier chunks.
    """

    @staticmethod
    def forward(ctx, settings: Settings, ring: Ring, q, k, v, *form_tensors):
        share = Share(q, k, v, of_tensors(settings.form, form_tensors), settings, ring)
        merged = Merged(share)
        plans = merged.add_own_chunks()
        needed = agree(share, merged.lse.clone())
        merged.add_other_chunks(needed)
        o, lse = merged.o.to(q.dtype), merged.lse
        ctx.settings, ctx.ring, ctx.needed, ctx.plans = settings, ring, needed, plans
        ctx.save_for_backward(o, lse, q, k, v, *form_tensors)
        return o, lse

    @staticmethod
    def backward(ctx, grad_o, grad_lse):
        o, lse, *tensors = ctx.saved_tensors
        q, k, v, *form_tensors = tensors
        wanted = ctx.needs_input_grad[5:]
        with torch.no_grad():
            form = of_tensors(ctx.settings.form, form_tensors)
            share = Share(q, k, v, form, ctx.settings, ctx.ring)
            gradients = Gradients(share, grad_o, grad_lse, o, lse, any(wanted))
            gradients.add_own_chunks(ctx.plans)
            gradients.add_other_chunks(ctx.needed)
            of_inputs = gradients.of_inputs(wanted)
        if torch.is_grad_enabled():
            of_inputs = [
                None if x is None else Constant.apply(x, grad_o, grad_lse, *tensors)
                for x in of_inputs
            ]
        return None, None, *of_inputs


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
        made = {}
        for pair in self.share.own_pairs():
            made[pair] = self._plan(pair)
            self._add(pair, self.share.keys, made[pair])
        return made

    def add_other_chunks(self, needed: list[Needed]) -> None:
        for _, keys in self.share.hops(needed):
            for pair, plan in self.share.pairs(needed, keys):
                self._add(pair, keys, plan)

    def _plan(self, pair: Pair) -> Tensor | None:
        """The ordinary one."""
        problem = self.share.problem(pair, self.share.keys, None)
        return operators.plan(problem) if plans.is_worthwhile(problem) else None

    def _add(self, pair: Pair, keys: Keys, plan: Tensor | None) -> None:
        new_o, new_lse = operators.forward(self.share.problem(pair, keys, plan))
        at = self.share.keys.rows.of(pair.query_chunk)
        o, lse = self.o[:, :, at], self.lse[..., at]
        both = torch.logaddexp(lse, new_lse)
        kept, added = (
            torch.where(x == -torch.inf, 0, (x - both).exp())[..., None] for x in (lse, new_lse)
        )
        o.mul_(kept).add_(new_o * added)
        lse.copy_(both)
