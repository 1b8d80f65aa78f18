"""The gradient of a table of distances, as partial sums of blocks of queries.

A block adds to the sums of one slot, so that results are repeatable only if no two blocks of a
launch share a slot. The number of slots is limited, so that memory stays O(N): where there are more
blocks, several launches follow one another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import Problem
from .variants import BLOCK_M

LEAST_BLOCKS = 512  # of a launch, about four per multiprocessor


def partial_sums(problem: Problem) -> Tensor:
    """Returns zeros (B or 1, H, slots, distances) float32, of at most the size of q or, if that is
    more, as many as LEAST_BLOCKS need."""
    table, (batch, heads) = problem.form.tensors[0], (problem.batch, problem.q.shape[1])
    entries, distances = table.shape[0], table.shape[2]
    slot_bytes = 4 * entries * heads * distances
    slots = max(problem.q.nbytes // slot_bytes, -(-LEAST_BLOCKS // (entries * heads)))
    most = batch // entries * _blocks(problem)
    shape = entries, heads, min(slots, most), distances
    return torch.zeros(shape, dtype=torch.float32, device=table.device)


def launches(problem: Problem, sums: Tensor | None, order: Tensor | None) -> list[Tensor | None]:
    """Returns the program numbers of each launch of the kernel for dq, None for all in the default
    order. sums: the partial sums. order: all program numbers, by decreasing work."""
    blocks, heads = _blocks(problem), problem.q.shape[1]
    if sums is None or problem.batch // sums.shape[0] * blocks <= sums.shape[2]:
        return [order]
    entries, _, slots, _ = sums.shape
    if order is None:
        numbers = torch.arange(problem.batch * heads * blocks, device=sums.device)
        order = numbers.view(-1, blocks).flip(1).T.flatten().int()
    block, b = order % blocks, order // (heads * blocks)
    launch = (block if entries > 1 else b * blocks + block) // slots
    return list(order[launch.argsort(stable=True)].split(entries * heads * slots))


def _blocks(problem: Problem) -> int:
    return -(-problem.geometry.n_query // BLOCK_M)
