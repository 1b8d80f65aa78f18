"""Launches the kernel of the gradient of a distance table."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import problem as calls
from ..attention.backward_table import attn_bwd_table_kernel
from ..operands import Bias, Plan, of_entries, problem_of, rows
from . import plans
from .configured import configure
from .options import start

# The maximum number of sums over diagonals that packed sequences use at a time.
_TABLE_SUMS = 2**24


def table_gradient(
    problem: calls.Problem, plan: Plan | None, given: tuple[Tensor, ...], bias: Bias
) -> Tensor:
    """Returns the gradient of the table, (B or 1, H, length); see attn_bwd_table_kernel.

    given: q, k, v, grad_o, lse in base 2 and delta. plan: the key ranges of the queries.
    """
    configured, kernel_problem = configure("backward_table", problem), problem_of(problem, plan)
    (q, *_), geometry, sequences = given, problem.geometry, problem.sequences
    entries, _, length = problem.form.tensors[0].shape
    block = configured.config.block_m
    # The difference of row and column, relative to diagonal 0, at which the table begins.
    begin = geometry.first_distance - 1
    if sequences is None:
        begin -= geometry.n_key - geometry.n_query
        diagonals = (begin + length - 1) // block - begin // block + 2
    else:
        _, n_query, _, n_key, shift = sequences.rows.unbind(1)
        begin = (begin + n_query - n_key - shift)[:, None, None]
        diagonals = (length + block - 2) // block + 2
    first = begin // block
    place = torch.arange(length, device=q.device) + (begin - first * block)

    parts = [slice(0, problem.batch)]
    if sequences is not None and sequences.is_packed:
        step = max(1, _TABLE_SUMS // (q.shape[1] * diagonals * 2 * block))
        batch = problem.batch
        parts = [slice(b, min(b + step, batch)) for b in range(0, batch, step)] or parts
    gradients = []
    for part in parts:
        own, own_first, own_place = kernel_problem, first, place
        if sequences is not None:
            of_part = {
                "sequences": sequences.rows[part],
                "plan": plans.of_entries(kernel_problem.plan, part),
            }
            own = kernel_problem._replace(**of_part)
            own_first, own_place = first[part].int(), place[part]
        batch = part.stop - part.start
        sums = q.new_empty((batch, q.shape[1], diagonals, 2, block), dtype=torch.float32)
        start(attn_bwd_table_kernel, (batch * q.shape[1], diagonals), configured.config)(
            *map(rows, given),
            sums,
            own_first,
            bias._replace(terms=of_entries(bias.terms, part)),
            own,
            length,
            BLOCK=block,
            BLOCK_D=configured.block_d,
            BLOCK_DV=configured.block_dv,
        )
        of_distances = (sums[:, :, :-1, 1] + sums[:, :, 1:, 0]).flatten(2)
        gradient = of_distances.gather(-1, own_place.expand(batch, q.shape[1], length))
        gradients.append(gradient.sum(0, keepdim=True) if entries == 1 else gradient)
    return sum(gradients) if entries == 1 else torch.cat(gradients)
