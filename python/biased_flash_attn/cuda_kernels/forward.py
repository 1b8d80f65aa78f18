"""The forward kernel on tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import problem as calls
from .. import schedule
from .launch import Launcher, addressable
from .operands import Shared, address
from .parameters import ForwardParams, Rows
from .variants import GROUP_M, Variant


def forward(launcher: Launcher, problem: calls.Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns o (B, H, Nq, Dv) in q's dtype, and lse, pivot and log_sum (B, H, Nq) in float32."""
    q, k, v = (addressable(x) for x in (problem.q, problem.k, problem.v))
    results = problem.empty_forward_results()
    shared = Shared.of(problem)
    variant = Variant(*shared.arguments)
    order = None if problem.plan is None else schedule.for_queries(problem, variant.block_m)
    fields = shared.problem(problem.geometry.n_query, variant.block_m, order)
    programs = problem.batch * q.shape[1] * fields.blocks
    grid = min(programs, launcher.driver.multiprocessors(q.device))
    tickets = q.new_zeros(1, dtype=torch.int32) if grid < programs else None
    params = ForwardParams(
        launcher.tensor_map(q, GROUP_M),
        *(launcher.tensor_map(x, variant.tile.block_n) for x in (k, v)),
        fields,
        shared.bias,
        *(*map(Rows.of, results), v.shape[3], programs, address(tickets)),
    )
    launcher.launch(variant, grid, params, shared.tensors(q, k, v, *results, order, tickets))
    return results
