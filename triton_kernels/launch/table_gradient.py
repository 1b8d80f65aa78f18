"""Launches the kernel of the gradient of a distance table."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import problem as calls
from ..attention.backward_table import attn_bwd_table_kernel
from ..operands import Bias, Plan, for_entries, strided
from .configured import configure
from .diagonals import diagonals
from .options import start


def table_gradient(
    problem: calls.Problem, plan: Plan | None, given: tuple[Tensor, ...], bias: Bias
) -> Tensor:
    """Returns the gradient of the table, (B or 1, H, length); see attn_bwd_table_kernel.

    given: q, k, v, grad_o, lse in base 2 and delta. plan: the key ranges of the queries.
    """
    configured = configure("backward_table", problem)
    entries, _, length = problem.form.tensors[0].shape
    block, first = configured.config.block_m, problem.geometry.first_distance
    gradients = []
    for part in diagonals(problem, plan, block, first, length, 2 * block):
        shape = part.batch, part.problem.heads, part.count, 2 * block, 1
        sums = problem.q.new_empty(shape, dtype=torch.float32)
        start(attn_bwd_table_kernel, part.grid, configured.config)(
            *map(strided, given),
            sums,
            part.first,
            bias._replace(table=for_entries(bias.table, part.entries)),
            part.problem,
            length,
            BLOCK=block,
            BLOCK_D=configured.block_d,
            BLOCK_DV=configured.block_dv,
        )
        gradient = part.per_distance(sums).squeeze(-1)
        gradients.append(gradient.sum(0, keepdim=True) if entries == 1 else gradient)
    return sum(gradients) if entries == 1 else torch.cat(gradients)
