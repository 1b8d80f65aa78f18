"""Launches the kernel of the gradients of the tables of a relative bias."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ... import problem as calls
from ..attention.backward_relative import attn_bwd_relative_kernel
from ..operands import Bias, Plan, Strided, for_entries, strided
from .configured import configure
from .diagonals import diagonals
from .options import start


def tables_gradients(
    problem: calls.Problem, plan: Plan | None, given: tuple[Tensor, ...], bias: Bias
) -> list[Tensor]:
    """Returns the gradients of the tables that queries and keys are multiplied by, (1, H, R, n)
    each; see attn_bwd_relative_kernel.

    given: q, k, v, grad_o, lse in base 2 and delta. plan: the key ranges of the queries.
    """
    configured, geometry = configure("backward_table", problem), problem.geometry
    block, columns = configured.config.block_m, bias.vector_tables.columns
    ranks = bias.vector_tables.query_rank.value, bias.vector_tables.key_rank.value
    # The distances that contribute: those of the table or, where its ends continue, all.
    first_distance = 0 if geometry.causal else -(columns // 2)
    first, end = geometry.first_distance, geometry.first_distance + geometry.n_distances
    if not bias.vector_tables.last:
        first, end = max(first, first_distance), min(end, first_distance + columns)
    count = max(1, end - first)
    gradients = [0, 0]
    for part in diagonals(problem, plan, block, first, count, 2 * block * sum(ranks)):
        shape = part.batch, part.problem.heads, part.count, 2 * block
        sums = [problem.q.new_empty((*shape, rank), dtype=torch.float32) for rank in ranks]
        start(attn_bwd_relative_kernel, part.grid, configured.config)(
            *map(strided, given),
            *(Strided(x, *x.flatten(0, 1).stride()[:3]) for x in sums),
            part.first,
            bias._replace(
                query_vectors=for_entries(bias.query_vectors, part.entries),
                key_vectors=for_entries(bias.key_vectors, part.entries),
            ),
            part.problem,
            BLOCK=block,
            BLOCK_D=configured.block_d,
            BLOCK_DV=configured.block_dv,
        )
        for n, x in enumerate(sums):
            per_distance = part.per_distance(x).sum(0, keepdim=True)
            gradients[n] += _to_columns(per_distance, first - first_distance, columns)
    return [x.mT for x in gradients]


def _to_columns(x: Tensor, first: int, columns: int) -> Tensor:
    """Maps sums over distances (1, H, distances, R), the first of which has the column `first`, to
    columns. The first and the last column also receive the sums of all distances beyond them."""
    inside = max(first, 0)
    before, x = x[:, :, : inside - first], x[:, :, inside - first :]
    beyond, x = x[:, :, columns - inside :], x[:, :, : columns - inside]
    gradient = pad(x, (0, 0, inside, columns - inside - x.shape[2]))
    gradient[:, :, 0] += before.sum(2)
    gradient[:, :, -1] += beyond.sum(2)
    return gradient
