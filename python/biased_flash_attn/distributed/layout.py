"""The zigzag layout of a sequence: of 2R chunks, rank r of R has chunks r and 2R - 1 - r.

Under a causal mask, early queries have few visible keys and late ones many. With this layout, all
ranks have the same number of visible pairs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """Returns the chunks of a rank, in the order of its rows."""
    return rank, 2 * ranks - 1 - rank


def shard(x: Tensor, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Returns this rank's partition, along dimension dim, of a tensor x that every rank holds in
    full.

    Differentiable. Raises ValueError unless x.shape[dim] is a multiple of twice the number of
    ranks.
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
    """Gathers the partitions x of all ranks into the full tensor, in the order of positions.

    Not differentiable. Raises ValueError if x.shape[dim] is odd.
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
    """Returns the positions of this rank's n_local tokens in the sequence, (n_local,) int64.

    Raises ValueError if n_local is odd.
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
    """Returns this rank's index in the group, and the size of the group."""
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
