"""The gradient of a table of distances, as partial sums of blocks.

A block adds to the sums of one slot, so that results are repeatable only if no two blocks of a
launch share a slot. The number of slots is limited, so that memory stays O(N): where there are more
blocks, several launches follow one another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import Problem

LEAST_BLOCKS = 512  # of a launch, about four per multiprocessor
MOST_OF_Q = 2  # the memory of q in float32, which sums of dq take too


def partial_sums(problem: Problem, programs: int, blocks: int) -> Tensor:
    """Returns zeros (B or 1, H, slots, distances) float32, of at most MOST_OF_Q times the size of q
    or, if that is more, as many as LEAST_BLOCKS need.

    programs: the heads that have programs. blocks: those of each of these heads.
    """
    table, (batch, heads) = problem.form.tensors[0], (problem.batch, problem.q.shape[1])
    entries, distances = table.shape[0], table.shape[2]
    slot_bytes = 4 * entries * heads * distances
    fitting = MOST_OF_Q * problem.q.nbytes // slot_bytes
    slots = max(fitting, -(-LEAST_BLOCKS // (entries * programs)))
    most = batch // entries * blocks
    shape = entries, heads, min(slots, most), distances
    return torch.zeros(shape, dtype=torch.float32, device=table.device)


def launches(
    sums: Tensor, shape: tuple[int, int, int], order: Tensor | None, last_first: bool
) -> list[Tensor | None]:
    """Returns the program numbers of each launch of a kernel that adds to partial sums, None for
    all in the default order: of the last or first blocks first.

    shape: batch, the heads of a program number, and their blocks. order: all program numbers.
    """
    batch, heads, blocks = shape
    entries, _, slots, _ = sums.shape
    if batch // entries * blocks <= slots:
        return [order]
    if order is None:
        numbers = torch.arange(batch * heads * blocks, device=sums.device).view(-1, blocks)
        order = (numbers.flip(1) if last_first else numbers).T.flatten().int()
    block, b = order % blocks, order // (heads * blocks)
    launch = (block if entries > 1 else b * blocks + block) // slots
    sizes = launch.bincount().tolist()
    return list(order[launch.argsort(stable=True)].split(sizes))
