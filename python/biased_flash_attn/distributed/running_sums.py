"""Running sums along a sequence whose chunks lie on several ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import chunks_of
from .ring import Ring


def sums_before(within: Tensor, ring: Ring) -> Tensor:
    """The sum of all earlier chunks, for running sums (B or 1, H or 1, n_local) that begin anew
    with each of this rank's two chunks; the same shape, float64.

    Gradients reach the steps of all ranks.
    """
    chunks = within.unflatten(-1, (2, -1))
    before = SumsBefore.apply(chunks[..., -1].movedim(-1, 0), ring)
    return before.movedim(0, -1)[..., None].expand_as(chunks).flatten(-2)


class SumsBefore(torch.autograd.Function):
    """For each of this rank's chunks, the sum over all earlier chunks: (2, ...) to (2, ...)."""

    @staticmethod
    def forward(ctx, totals: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return own(before(in_order(totals, ring, "the sums of their steps")), ring)

    @staticmethod
    def backward(ctx, grad: Tensor):
        everyones = in_order(grad, ctx.ring, "the gradients of their sums")
        return own(before(everyones.flip(0)).flip(0), ctx.ring), None


def before(x: Tensor) -> Tensor:
    """The sum of all earlier ones, of which the one itself, however large, takes no digits."""
    return torch.cat([torch.zeros_like(x[:1]), x[:-1].cumsum(0)])


def in_order(x: Tensor, ring: Ring, what: str) -> Tensor:
    """What each rank has of its two chunks, (2, ...), as (chunks, ...)."""
    places = torch.tensor([chunks_of(rank, ring.size) for rank in range(ring.size)])
    return torch.cat(ring.gather(x, what))[places.flatten().argsort().to(x.device)]


def own(x: Tensor, ring: Ring) -> Tensor:
    return x[list(chunks_of(ring.rank, ring.size))]
