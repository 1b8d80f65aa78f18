"""The kernels on tensors: allocates the results and starts one program a block and head."""

from __future__ import annotations

from functools import partial

import torch
import triton
from torch import Tensor
from triton.language import constexpr

from . import configs, plans
from .backward import attn_bwd_delta_kernel
from .backward_keys import attn_bwd_dkv_kernel
from .backward_queries import attn_bwd_dq_kernel
from .configs import Config
from .decode_launch import decode as decode
from .factors import key_factors_kernel, query_factors_kernel
from .forward import attn_fwd_kernel
from .launching import OPTIONS, processor, where_the_tensors_are
from .operands import Bias, Factors, Problem, per_head, rows
from .polynomials import TABLE_ROWS, interpolation, table_factors_kernel
from .primitives import FACTORS, LOG2E
from .primitives import INTERPRETED as INTERPRETED
from .table import attn_bwd_table_kernel
from .trim import attn_trim_kernel


@where_the_tensors_are
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Tensor | None,
    gain: Tensor | None,
    form: str,
    scale: float,
    causal: bool,
    window: int | None,
    plan: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns o (B, H, Nq, Dv) in q's dtype and lse (B, H, Nq) in float32."""
    o = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    bias, problem = _operands(q, k, v, terms, gain, form, scale, causal, window)
    config, sizes = _sizes("forward", q, v, bias, plan is not None)
    problem = problem._replace(plan=plans.of_queries(plan, problem, config.block_m))
    bias = _with_factors(bias, problem, config)
    tensors = map(rows, (q, k, v, o, lse))
    _launch(attn_fwd_kernel, q, q.shape[1], config.block_m, config)(
        *tensors, bias, problem, **sizes
    )
    return o, lse


@where_the_tensors_are
def backward(
    grad_o: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    terms: Tensor | None,
    gain: Tensor | None,
    form: str,
    scale: float,
    causal: bool,
    window: int | None,
    with_bias_gradient: bool,
    plan: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of q, k, v, terms and gain; the last two only where wanted."""
    # What autograd hands over may be expanded, as the gradient of a sum is; the kernels read rows.
    grad_o = grad_o if grad_o.stride(3) == 1 else grad_o.contiguous()
    bias, problem = _operands(q, k, v, terms, gain, form, scale, causal, window)
    statistics = torch.empty_like(lse), torch.empty_like(lse)
    _delta(problem, o, grad_o, lse, grad_lse.contiguous(), *statistics)
    given = (q, k, v, grad_o, *statistics)

    grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
    of_gain, of_queries = torch.empty_like(lse), torch.empty_like(lse)
    of_keys = lse.new_empty((*lse.shape[:2], k.shape[2]))
    has_gain = with_bias_gradient and form not in ("none", "distance")
    has_sums = has_gain and form != "linear"

    config, sizes = _sizes("backward_queries", q, v, bias, plan is not None)
    problem = problem._replace(plan=plans.of_queries(plan, problem, config.block_m))
    tensors = map(rows, (*given, grad_q, of_gain, of_queries))
    _launch(attn_bwd_dq_kernel, q, q.shape[1], config.block_m, config)(
        *tensors,
        _with_factors(bias, problem, config),
        problem,
        **sizes,
        BIAS_GRADIENT=has_gain,
    )
    config, sizes = _sizes("backward_keys", q, v, bias, plan is not None, has_sums)
    tensors = map(rows, (*given, grad_k, grad_v, of_keys))
    _launch(attn_bwd_dkv_kernel, k, k.shape[1], config.block_n, config)(
        *tensors,
        _with_factors(bias, problem, config, statistics[0]),
        problem._replace(plan=plans.of_keys(plan, problem, config.block_n)),
        **sizes,
        BIAS_GRADIENT=has_sums,
    )

    grad_terms, grad_gain = None, None
    if with_bias_gradient and terms is not None:
        if form == "linear":
            grad_terms = -of_gain.sum(-1, dtype=torch.float64)
        elif form == "distance":
            grad_terms = _table_gradient(given, bias, problem, causal, terms.shape[2])
        else:
            grad_terms = _sums_gradient(of_queries, of_keys)
        grad_terms = grad_terms.sum_to_size(terms.shape).to(terms.dtype)
        grad_gain = None if gain is None else of_gain.sum_to_size(gain.shape)
    return grad_q, grad_k, grad_v, grad_terms, grad_gain


@where_the_tensors_are
def trim(
    q: Tensor,
    k: Tensor,
    terms: Tensor | None,
    gain: Tensor | None,
    form: str,
    scale: float,
    causal: bool,
    window: int | None,
    plan: Tensor,
    near: Tensor,
    share: float,
    reach: int,
    from_end: bool,
) -> Tensor:
    """Where plan's ranges end if from_end, else begin, with more left out: (B, H, tiles) int32.

    For each query the exponentials of the logits of what goes sum to share * exp(near) at most, and
    its `reach` nearest past keys stay. Nothing goes where near, (B, H, Nq) float32, is NaN.
    """
    bias, problem = _operands(q, k, k, terms, gain, form, scale, causal, window)
    # All its pairs are computed one by one.
    config, sizes = _sizes("forward", q, k, bias._replace(squared=constexpr(True)), planned=True)
    sizes["BLOCK_N"] = max(16, config.block_n // 2)
    blocks = triton.cdiv(problem.n_query, config.block_m)
    cut = plan.new_empty((*q.shape[:2], blocks))
    _launch(attn_trim_kernel, q, q.shape[1], config.block_m, config)(
        *map(rows, (q, k, near.contiguous(), cut)),
        bias,
        problem._replace(plan=plans.of_queries(plan, problem, config.block_m)),
        share,
        reach,
        from_end,
        **sizes,
    )
    return plans.cut_of_tiles(cut, config.block_m, from_end)


def _operands(q, k, v, terms, gain, form, scale, causal, window) -> tuple[Bias, Problem]:
    heads, n_key = q.shape[1], k.shape[2]
    problem = Problem(
        heads,
        heads // k.shape[1],
        q.shape[2],
        n_key,
        n_key if window is None else min(window, n_key),
        scale,
        scale * LOG2E.value,
        *map(constexpr, (q.shape[3], v.shape[3], causal, window is not None, scale > 0)),
    )
    squared = form == "log1p_square"
    # float32 has no matrix units that are exact: a column there costs as much as the bias itself.
    # Wider heads leave no registers for the sums of dS times factors.
    factored = form in ("linear", "distance", "cumulative") and q.dtype != torch.float32
    factored = factored and max(q.shape[3], v.shape[3]) <= 128 and scale > 0 and n_key > 0
    if form == "distance":
        terms = terms * LOG2E.value
    flags = map(constexpr, ("cumulative" if squared else form, squared, factored))
    high, low = None, None
    if form in ("cumulative", "log1p_square"):
        high = terms.float()
        low = torch.where(high.isfinite(), terms - high, 0).float()
    return Bias(*flags, *map(per_head, (terms, gain, high, low))), problem


def _with_factors(
    bias: Bias, problem: Problem, config: Config, lse_in_base_2: Tensor | None = None
) -> Bias:
    """The bias with its factors, if it has any, for the tiles of a configuration.

    Those of queries include lse where it is given.
    """
    form, terms = bias.form.value, bias.terms and bias.terms.start
    if not bias.factored.value:
        return bias
    if form == "distance":
        return _with_table_factors(bias, problem, config.block_m)

    per_query = [x for x in (lse_in_base_2, bias.gain and bias.gain.start) if x is not None]
    if per_query:
        shape = (*per_query[0].shape[:2], problem.n_query)
    else:
        shape = (*(terms.shape[:2] if form == "linear" else (1, 1)), config.block_m)
    lse = None if lse_in_base_2 is None else rows(lse_in_base_2)
    of_queries = _factors(query_factors_kernel, shape, config.block_m, bias, problem, lse)
    shape = (1, 1, config.block_n) if form == "linear" else terms.shape
    of_keys = _factors(key_factors_kernel, shape, config.block_n, bias, problem)
    if not per_query:
        of_queries = of_queries._replace(row=0)
    return bias._replace(query_factors=of_queries, key_factors=of_keys)


def _factors(kernel, shape, block: int, bias: Bias, problem: Problem, *more) -> Factors:
    """What a kernel writes in blocks of rows, for each side: (sides, *shape, FACTORS)."""
    sides = (1,) if problem.causal.value else (1, -1)
    blocks = triton.cdiv(shape[2], block)
    factors = _empty_factors(bias, len(sides), *shape[:2], blocks * block)
    for part, side in zip(factors, sides, strict=True):
        kernel[(*shape[:2], blocks)](rows(part), bias, problem, *more, block, side, **OPTIONS)
    return Factors(*per_head(factors[0]), factors.stride(0))


def _with_table_factors(bias: Bias, problem: Problem, block_m: int) -> Bias:
    batch, heads, length = bias.terms.start.shape
    if length < 2 * block_m:
        return bias._replace(factored=constexpr(False))
    of_rows = _empty_factors(bias, 1, 1, block_m)
    of_keys = _empty_factors(bias, batch, heads, length - block_m + 1)
    blocks = triton.cdiv(of_keys.shape[2], TABLE_ROWS)
    rough = of_keys.new_empty((batch, heads, blocks, 2), dtype=torch.int32)
    nodes, weights = interpolation(block_m)
    table_factors_kernel[batch, heads, blocks](
        *(rows(of_rows), rows(of_keys), rows(rough), bias, problem, length),
        *(block_m, TABLE_ROWS, nodes, weights),
        **OPTIONS,
    )
    far = torch.stack([rough[..., 1].amax(2) + 1, rough[..., 0].amin(2) - 1], 2)
    return bias._replace(
        query_factors=Factors(*per_head(of_rows)),
        key_factors=Factors(*per_head(of_keys)),
        far=per_head(far),
    )


def _empty_factors(bias: Bias, *shape: int) -> Tensor:
    return bias.terms.start.new_empty((*shape, FACTORS.value), dtype=torch.bfloat16)


def _sizes(
    kernel: str, q: Tensor, v: Tensor, bias: Bias, planned: bool, trained: bool = False
) -> tuple[Config, dict[str, int]]:
    """The configuration of a kernel, and what of it the kernel has to know."""
    block_d, block_dv = (max(16, triton.next_power_of_2(x.shape[3])) for x in (q, v))
    form = "log1p_square" if bias.squared.value else bias.form.value
    kind = configs.Kind(form, bias.gain is not None, planned, trained)
    config = configs.choose(kernel, processor(), q.dtype, max(block_d, block_dv), kind)
    return config, {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
    }


def _launch(kernel, x: Tensor, heads: int, block: int, config: Config):
    """The kernel over blocks of the rows of x, for every head: a call of its arguments."""
    grid = (x.shape[0] * heads, triton.cdiv(x.shape[2], block))
    return partial(
        kernel[grid], num_warps=config.num_warps, num_stages=config.num_stages, **OPTIONS
    )


def _delta(problem: Problem, o: Tensor, *tensors: Tensor) -> None:
    block_dv = max(16, triton.next_power_of_2(o.shape[3]))
    config = Config(16, 0, num_warps=4)
    _launch(attn_bwd_delta_kernel, o, o.shape[1], config.block_m, config)(
        *map(rows, (o, *tensors)), problem, BLOCK_M=config.block_m, BLOCK_DV=block_dv
    )


def _table_gradient(given, bias: Bias, problem: Problem, causal: bool, length: int) -> Tensor:
    """(B, H, length), from sums over the diagonals of tiles: see attn_bwd_table_kernel."""
    q, _, v, *_ = given
    config, sizes = _sizes("backward_table", q, v, bias, problem.plan is not None)
    block, shift = config.block_m, problem.n_key - problem.n_query
    begin = (0 if causal else 1 - problem.n_query) - shift - 1
    first, last = begin // block, (begin + length - 1) // block
    partial_sums = q.new_empty((*q.shape[:2], last - first + 2, 2, block), dtype=torch.float32)
    _launch(attn_bwd_table_kernel, partial_sums, q.shape[1], 1, config)(
        *map(rows, given),
        partial_sums,
        first,
        bias,
        problem,
        length,
        BLOCK=block,
        BLOCK_D=sizes["BLOCK_D"],
        BLOCK_DV=sizes["BLOCK_DV"],
    )
    of_distances = partial_sums[:, :, :-1, 1] + partial_sums[:, :, 1:, 0]
    return of_distances.flatten(2)[..., begin - first * block :][..., :length]


def _sums_gradient(of_queries: Tensor, of_keys: Tensor) -> Tensor:
    """(B, H, Nk) float64, of C[p] of each query and C[j] of each key."""
    gradient = of_keys.double()
    shown = min(of_queries.shape[2], of_keys.shape[2])
    gradient[..., of_keys.shape[2] - shown :] += of_queries[..., of_queries.shape[2] - shown :]
    return gradient
