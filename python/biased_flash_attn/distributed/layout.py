"""Which tokens a rank has: of 2R chunks of a sequence, rank r of R has chunks r and 2R - 1 - r.

Under a causal mask early queries see few keys and late ones many; so every rank has as many pairs
of query and key to compute.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """The chunks of a rank, in the order in which it holds them."""
    return rank, 2 * ranks - 1 - rank


def shard(x: Tensor, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's part of x, which every rank has whole, along dimension dim.

    Gradients pass. Raises ValueError unless twice the number of ranks divides x.shape[dim].
    """
    rank, ranks = rank_and_size(group)
    if x.shape[dim] % (2 * ranks):
        raise ValueError(
            f"x has {x.shape[dim]} rows in dimension {dim}; on {ranks} ranks their number must be a"
            f" multiple of {2 * ranks}: for causal calls, pad the sequence at its end"
        )
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat([chunks[c] for c in chunks_of(rank, ranks)], dim)


def unshard(x: Tensor, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """The whole of which each rank has the part x, in the order of positions; without gradients.

    Raises ValueError where x.shape[dim] is odd, as no part is.
    """
    _, ranks = rank_and_size(group)
    check_two_chunks(f"x.shape[{dim}]", x.shape[dim])
    x = x.detach().contiguous()
    parts = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(parts, x, group=group)
    chunks: list[Tensor] = [x] * (2 * ranks)
    for rank, part in enumerate(parts):
        first, second = chunks_of(rank, ranks)
        chunks[first], chunks[second] = part.chunk(2, dim)
    return torch.cat(chunks, dim)


def positions(
    n_local: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The positions of this rank's n_local tokens in their sequence, (n_local,) int64.

    Raises ValueError for an odd number of them.
    """
    rank, ranks = rank_and_size(group)
    check_two_chunks("n_local", n_local)
    n = n_local // 2
    return torch.cat(
        [torch.arange(c * n, (c + 1) * n, device=device) for c in chunks_of(rank, ranks)]
    )


def check_two_chunks(name: str, length: int) -> None:
    if length % 2:
        raise ValueError(f"{name} is {length}; it must be even, as each rank has two chunks")


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank within the group, and the number of ranks there."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "torch.distributed is not initialized; call torch.distributed.init_process_group first"
        )
    if isinstance(group, DeviceMesh):
        raise TypeError("group is a DeviceMesh; pass mesh.get_group(), of one of its dimensions")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group does not contain this rank; call only on the ranks of the group")
    return rank, dist.get_world_size(group)
