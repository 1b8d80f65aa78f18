"""Prefix sums along a sequence whose chunks are distributed over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import chunks_of
from .ring import Ring


def exclusive_chunk_sums(within: Tensor, ring: Ring) -> Tensor:
    """Returns the sum of all chunks before each token's chunk, in the shape of `within`, float64.

    within (B or 1, H or 1, n_local): prefix sums that restart at each of this rank's two chunks.
    Differentiable with respect to the steps of all ranks.
    """
    chunks = within.unflatten(-1, (2, -1))
    before = ExclusiveChunkSums.apply(chunks[..., -1].movedim(-1, 0), ring)
    return before.movedim(0, -1)[..., None].expand_as(chunks).flatten(-2)


class ExclusiveChunkSums(torch.autograd.Function):
    """Maps the totals of this rank's chunks, (2, ...), to the sums over all earlier chunks, (2,
    ...)."""

    @staticmethod
    def forward(ctx, totals: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return select_own(
            exclusive_cumsum(gather_chunks(totals, ring, "the sums of their steps")), ring
        )

    @staticmethod
    def backward(ctx, grad: Tensor):
        everyones = gather_chunks(grad, ctx.ring, "the gradients of their sums")
        return select_own(exclusive_cumsum(everyones.flip(0)).flip(0), ctx.ring), None


def exclusive_cumsum(x: Tensor) -> Tensor:
    """Returns the sum over all earlier entries. The entry itself is never added, and so does not
    round the sum, however large it is."""
    return torch.cat([torch.zeros_like(x[:1]), x[:-1].cumsum(0)])


def gather_chunks(x: Tensor, ring: Ring, what: str) -> Tensor:
    """Gathers the entries (2, ...) of every rank's two chunks in the order of chunks, (chunks,
    ...)."""
    places = torch.tensor([chunks_of(rank, ring.size) for rank in range(ring.size)])
    return torch.cat(ring.gather(x, what))[places.flatten().argsort().to(x.device)]


def select_own(x: Tensor, ring: Ring) -> Tensor:
    return x[list(chunks_of(ring.rank, ring.size))]
