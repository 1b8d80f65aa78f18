"""Launches the kernels on tensors.

Each launch has three steps: choose the configuration from the problem, make the operands, and start
one program per block of rows of each head.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import triton
from torch import Tensor

from ... import problem as calls
from ..attention.backward import attn_bwd_delta_kernel
from ..attention.backward_keys import attn_bwd_dkv_kernel
from ..attention.backward_queries import attn_bwd_dq_kernel
from ..attention.forward import attn_fwd_kernel
from ..attention.trim import attn_trim_kernel
from ..configs import Config
from ..forms import Gathered, kernels_of
from ..operands import Bias, Plan, PlanOfKeys, Problem, problem_of, strided
from . import plans
from .bias_factors import with_factors
from .configured import Configured, configure
from .options import SUMS_OVER_LANES, on_its_device, start
from .relative_gradient import tables_gradients
from .table_gradient import table_gradient


@on_its_device
def forward(problem: calls.Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns o (B, H, Nq, Dv) in q's dtype, and lse, pivot and log_sum (B, H, Nq) in float32."""
    q, k, v = problem.q, problem.k, problem.v
    results = problem.empty_forward_results()
    tensors = [strided(x) for x in (q, k, v, *results)]
    configured = configure("forward", problem, (*tensors[1:3], problem.geometry.n_key))
    block_m = configured.config.block_m
    own = _kernel_problem(problem, configured, plans.for_queries(problem, block_m))
    bias = kernels_of(problem).bias(problem.form.tensors, q.dtype)
    bias = with_factors(bias, own, configured, problem.sequences)
    grid = problem.batch * q.shape[1], triton.cdiv(own.n_query, block_m)
    start(attn_fwd_kernel, grid, configured.config)(*tensors, bias, own, **configured.blocks)
    return results


@on_its_device
def backward(
    problem: calls.Problem,
    o: Tensor,
    pivot: Tensor,
    log_sum: Tensor,
    grad_o: Tensor,
    grad_lse: Tensor,
    form_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Returns the gradients of q, k, v and, with form_gradient, of the form's tensors."""
    # grad_o may be an expanded tensor, such as the gradient of a sum; the kernels need contiguous
    # rows.
    grad_o = grad_o if grad_o.stride(3) == 1 else grad_o.contiguous()
    q, k, v, form = problem.q, problem.k, problem.v, problem.form
    kernels = kernels_of(problem)
    bias = kernels.bias(form.tensors, q.dtype)
    # Gains are interleaved with D, so that one load reads both.
    lse_in_base_2 = torch.empty_like(pivot)
    delta = pivot.new_empty(pivot.shape if bias.gain is None else (*pivot.shape, 2))
    statistics = lse_in_base_2, delta
    of_rows = (x.contiguous() for x in (pivot, log_sum, grad_lse))
    _delta(problem, bias, o, grad_o, *of_rows, *statistics)
    given = (q, k, v, grad_o, *statistics)

    grad_q, grad_k, grad_v = problem.empty_gradients()
    streamed = strided(k), strided(v), problem.geometry.n_key
    configured = configure("backward_queries", problem, streamed)
    block_m = configured.config.block_m
    own = _kernel_problem(problem, configured, plans.for_queries(problem, block_m))
    grid = problem.batch * q.shape[1], triton.cdiv(own.n_query, block_m)
    plan = own.plan
    differentiate = table_gradient if bias.vector_tables is None else tables_gradients
    gathered = Gathered(
        problem,
        *kernels.empty_gradients(bias, problem, grid[1], trained=form_gradient),
        partial(differentiate, problem, plan, given, bias),
    )
    trained = form_gradient and kernels.trains_queries and gathered.grad_others.numel() > 0
    start(attn_bwd_dq_kernel, grid, configured.config)(
        *map(strided, (*given, grad_q, gathered.grad_gain, gathered.grad_others)),
        with_factors(bias, own, configured, problem.sequences),
        own,
        **configured.blocks,
        BIAS_GRADIENT=trained,
    )
    trained = form_gradient and kernels.trains_keys and gathered.grad_keys.numel() > 0
    streamed = strided(q), strided(grad_o), problem.geometry.n_query
    configured = configure("backward_keys", problem, streamed, trained=trained)
    block_n = configured.config.block_n
    own = _kernel_problem(problem, configured, plans.for_keys(problem, block_n))
    grid = problem.batch * k.shape[1], triton.cdiv(own.n_key, block_n)
    start(attn_bwd_dkv_kernel, grid, configured.config)(
        *map(strided, (*given, grad_k, grad_v, gathered.grad_keys)),
        with_factors(bias, own, configured, problem.sequences, lse_in_base_2),
        own,
        **configured.blocks,
        BIAS_GRADIENT=trained,
    )
    if not form_gradient:
        return grad_q, grad_k, grad_v, []
    grad_form = [
        grad.sum_to_size(x.shape).to(x.dtype)
        for grad, x in zip(kernels.gradients(gathered), form.tensors, strict=True)
    ]
    return grad_q, grad_k, grad_v, grad_form


@on_its_device
def trim(
    problem: calls.Problem, near: Tensor, fraction: float, near_keys: int, from_end: bool
) -> Tensor:
    """Returns the shortened ranges of the plan: their ends if from_end, else their beginnings. See
    `backends.protocol`."""
    problem = replace(problem, v=problem.k)  # the values are not read
    q, k = problem.q, problem.k
    configured = configure("trim", problem)
    block_m = configured.config.block_m
    blocks = triton.cdiv(problem.geometry.n_query, block_m)
    cut = problem.plan.new_empty((*q.shape[:2], blocks))
    start(attn_trim_kernel, (q.shape[0] * q.shape[1], blocks), configured.config)(
        *map(strided, (q, k, near.contiguous(), cut)),
        kernels_of(problem).bias(problem.form.tensors, q.dtype),
        problem_of(problem, plans.for_queries(problem, block_m)),
        fraction,
        near_keys,
        from_end,
        **configured.blocks,
    )
    return plans.combine_cuts(cut, block_m, from_end)


def _kernel_problem(
    problem: calls.Problem, configured: Configured, plan: Plan | PlanOfKeys | None
) -> Problem:
    narrow, same_stride = configured.narrow_offsets, configured.same_row_stride
    return problem_of(problem, plan, narrow_offsets=narrow, same_row_stride=same_stride)


def _delta(problem: calls.Problem, bias: Bias, o: Tensor, *tensors: Tensor) -> None:
    """Launches attn_bwd_delta_kernel for all rows, ignoring the division into sequences."""
    block_dv = max(16, triton.next_power_of_2(o.shape[3]))
    config, (batch, heads, n_query, _) = Config(16, 0, num_warps=4), o.shape
    geometry = replace(problem.geometry, n_query=n_query, sequences=None)
    grid = batch * heads, triton.cdiv(n_query, config.block_m)
    start(attn_bwd_delta_kernel, grid, config, SUMS_OVER_LANES)(
        *map(strided, (o, *tensors)),
        bias.gain,
        problem_of(replace(problem, geometry=geometry)),
        LIMITS_GAIN=bias.function is None,
        BLOCK_M=config.block_m,
        BLOCK_DV=block_dv,
    )
