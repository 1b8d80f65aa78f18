"""The kernels on tensors: allocates the results and starts one program a block and head."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import triton
from torch import Tensor
from triton.language import constexpr

from ..sequences import Sequences, empty_rows
from . import configs, plans
from .append import append as append
from .backward import attn_bwd_delta_kernel
from .backward_keys import attn_bwd_dkv_kernel
from .backward_queries import attn_bwd_dq_kernel
from .configs import Config, Features
from .decode_launch import decode as decode
from .factored import with_factors
from .forward import attn_fwd_kernel
from .launching import OPTIONS, SUMS_OVER_LANES, where_the_tensors_are
from .operands import Bias, Problem, Rows, of_entries, per_head, rows, with_margin
from .primitives import LOG2E
from .processors import processor
from .processors import unsupported as unsupported
from .table import attn_bwd_table_kernel
from .trim import attn_trim_kernel

# Where the kernels want their tensors; tests that emulate a GPU have them on the CPU.
DEVICE_TYPE = "cuda"
# Of the sums over diagonals that packed sequences have at a time.
_TABLE_SUMS = 2**24


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
    sequences: Sequences | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns o (B, H, Nq, Dv) in q's dtype and lse (B, H, Nq) in float32."""
    o = empty_rows(q, v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if sequences is not None:  # padding stays as it is
        o.zero_(), lse.fill_(-torch.inf)
    bias, problem = _operands(q, k, v, terms, gain, form, scale, causal, window, sequences)
    tensors = [rows(x) for x in (q, k, v, o, lse)]
    far = _are_far(*tensors[1:3], problem.n_key)
    config, sizes = _sizes("forward", q, v, bias, problem, plan is not None, far)
    problem = _through(*tensors[1:3], problem, config, far)
    config = replace(config, ahead=problem.rows_alike.value)
    problem = problem._replace(plan=plans.of_queries(plan, problem, config.block_m))
    bias = with_factors(bias, problem, config, sequences)
    grid = _batch(q, sequences) * q.shape[1], triton.cdiv(problem.n_query, config.block_m)
    _launch(attn_fwd_kernel, grid, config)(*tensors, bias, problem, **sizes)
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
    sequences: Sequences | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of q, k, v, terms and gain; the last two only where wanted."""
    # What autograd hands over may be expanded, as the gradient of a sum is; the kernels read rows.
    grad_o = grad_o if grad_o.stride(3) == 1 else grad_o.contiguous()
    bias, problem = _operands(q, k, v, terms, gain, form, scale, causal, window, sequences)
    has_gain = with_bias_gradient and form not in ("none", "distance")
    has_sums = has_gain and form != "linear"
    # Gains lie beside D, so that they are read at once with it.
    delta = torch.empty_like(lse) if gain is None else lse.new_empty((*lse.shape, 2))
    statistics = torch.empty_like(lse), delta
    _delta(problem, bias.gain, o, grad_o, lse, grad_lse.contiguous(), *statistics)
    given = (q, k, v, grad_o, *statistics)

    grad_q, grad_k, grad_v = (empty_rows(x, x.shape[3]) for x in (q, k, v))
    of_gain, of_queries = torch.empty_like(lse), torch.empty_like(lse)
    of_keys = lse.new_empty((*lse.shape[:2], k.shape[2]))
    if sequences is not None:
        for x in (grad_q, grad_k, grad_v, of_gain, of_queries, of_keys):
            x.zero_()
    batch = _batch(q, sequences)

    tensors = [rows(x) for x in (*given, grad_q, of_gain, of_queries)]
    far = _are_far(*tensors[1:3], problem.n_key)
    config, sizes = _sizes("backward_queries", q, v, bias, problem, plan is not None, far)
    problem = problem._replace(plan=plans.of_queries(plan, problem, config.block_m))
    through_keys = _through(*tensors[1:3], problem, config, far)
    config = replace(config, ahead=through_keys.rows_near.value)
    grid = batch * q.shape[1], triton.cdiv(problem.n_query, config.block_m)
    _launch(attn_bwd_dq_kernel, grid, config)(
        *tensors,
        with_factors(bias, problem, config, sequences),
        through_keys,
        **sizes,
        BIAS_GRADIENT=has_gain,
    )
    tensors = [rows(x) for x in (*given, grad_k, grad_v, of_keys)]
    far = _are_far(tensors[0], tensors[3], problem.n_query)
    kind = plan is not None, far, has_sums
    config, sizes = _sizes("backward_keys", q, v, bias, problem, *kind)
    through_queries = problem._replace(plan=plans.of_keys(plan, problem, config.block_n))
    through_queries = _through(tensors[0], tensors[3], through_queries, config, far)
    config = replace(config, ahead=through_queries.rows_near.value)
    grid = batch * k.shape[1], triton.cdiv(problem.n_key, config.block_n)
    _launch(attn_bwd_dkv_kernel, grid, config)(
        *tensors,
        with_factors(bias, problem, config, sequences, statistics[0]),
        through_queries,
        **sizes,
        BIAS_GRADIENT=has_sums,
    )

    grad_terms, grad_gain = None, None
    if with_bias_gradient and terms is not None:
        if form == "linear":
            grad_terms = -_sum_of_rows(of_gain, terms.shape[0], sequences)
        elif form == "distance":
            grad_terms = _table_gradient(given, bias, problem, causal, terms, sequences)
        else:
            grad_terms = _sums_gradient(of_queries, of_keys, sequences)
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
    # Its pairs are computed one by one, as those of outer functions are.
    one_by_one = bias._replace(squared=constexpr(True))
    config, sizes = _sizes("forward", q, k, one_by_one, problem, planned=True)
    sizes["BLOCK_N"] = max(16, config.block_n // 2)
    blocks = triton.cdiv(problem.n_query, config.block_m)
    cut = plan.new_empty((*q.shape[:2], blocks))
    _launch(attn_trim_kernel, (q.shape[0] * q.shape[1], blocks), config)(
        *map(rows, (q, k, near.contiguous(), cut)),
        bias,
        problem._replace(plan=plans.of_queries(plan, problem, config.block_m)),
        share,
        reach,
        from_end,
        **sizes,
    )
    return plans.cut_of_tiles(cut, config.block_m, from_end)


def _operands(
    q, k, v, terms, gain, form, scale, causal, window, sequences=None
) -> tuple[Bias, Problem]:
    heads, n_query, n_key = q.shape[1], q.shape[2], k.shape[2]
    reach = n_key
    if sequences is not None:
        n_query, n_key = sequences.longest_query, sequences.longest_key
        reach = n_key + sequences.longest_shift
    problem = Problem(
        heads,
        heads // k.shape[1],
        n_query,
        n_key,
        reach if window is None else min(window, reach),
        scale,
        scale * LOG2E.value,
        *map(constexpr, (q.shape[3], v.shape[3], causal, window is not None, scale > 0)),
        n_query,
        sequences=None if sequences is None else sequences.rows,
    )
    squared = form == "log1p_square"
    # float32 has no matrix units that are exact: a column there costs as much as the bias itself.
    # Wider heads leave no registers for the sums of dS times factors.
    factored = form in ("linear", "distance", "cumulative") and q.dtype != torch.float32
    factored = factored and max(q.shape[3], v.shape[3]) <= 128 and scale > 0 and n_key > 0
    if form == "distance":
        terms = with_margin(terms * LOG2E.value)
    flags = map(constexpr, ("cumulative" if squared else form, squared, factored))
    high, low = None, None
    if form in ("cumulative", "log1p_square"):
        high = terms.float()
        low = torch.where(high.isfinite(), terms - high, 0).float()
    return Bias(*flags, *map(per_head, (terms, gain, high, low))), problem


def _are_far(x: Rows, y: Rows, n: int) -> bool:
    """Whether offsets in a head's n rows of x or of y, and in a tile behind them, take 64 bits."""
    return (n + configs.LARGEST_TILE) * max(x.row, y.row) >= 2**31


def _through(x: Rows, y: Rows, problem: Problem, config: Config, far: bool) -> Problem:
    """The problem of a kernel that goes through the rows of x and of y.

    No registers are left for products ahead where offsets take 64 bits nor, in forward passes,
    where x and y have offsets of their own.
    """
    near = config.ahead and not far
    alike = near and x.row == y.row
    return problem._replace(rows_near=constexpr(near), rows_alike=constexpr(alike))


def _batch(q: Tensor, sequences: Sequences | None) -> int:
    return q.shape[0] if sequences is None else len(sequences.rows)


def _sizes(
    kernel: str,
    q: Tensor,
    v: Tensor,
    bias: Bias,
    problem: Problem,
    planned: bool,
    far: bool = False,
    trained: bool = False,
) -> tuple[Config, dict[str, int]]:
    """The configuration of a kernel, and what of it the kernel has to know."""
    block_d, block_dv = (max(16, triton.next_power_of_2(x.shape[3])) for x in (q, v))
    form, width = "log1p_square" if bias.squared.value else bias.form.value, max(block_d, block_dv)
    masks = problem.causal.value, problem.windowed.value
    features = Features(form, bias.gain is not None, planned, trained, *masks, far, q.dtype)
    with_sequences = problem.sequences is not None
    config = configs.choose(kernel, processor(), width, features, with_sequences)
    return config, {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
    }


def _launch(kernel, grid: tuple[int, int], config: Config, options: dict[str, bool] = OPTIONS):
    """The kernel for every head and block of its rows: a call of its arguments."""
    return partial(
        kernel[grid], num_warps=config.num_warps, num_stages=config.num_stages, **options
    )


def _delta(problem: Problem, gain: Rows | None, o: Tensor, *tensors: Tensor) -> None:
    """Of all rows, whatever sequences they belong to."""
    block_dv = max(16, triton.next_power_of_2(o.shape[3]))
    config, (batch, heads, n_query, _) = Config(16, 0, num_warps=4), o.shape
    problem = problem._replace(n_query=n_query, sequences=None)
    grid = batch * heads, triton.cdiv(n_query, config.block_m)
    _launch(attn_bwd_delta_kernel, grid, config, SUMS_OVER_LANES)(
        *map(rows, (o, *tensors)), gain, problem, BLOCK_M=config.block_m, BLOCK_DV=block_dv
    )


def _table_gradient(
    given, bias: Bias, problem: Problem, causal: bool, terms: Tensor, sequences: Sequences | None
) -> Tensor:
    """(B or 1, H, length), from sums over the diagonals of tiles: see attn_bwd_table_kernel."""
    q, _, v, *_ = given
    config, sizes = _sizes("backward_table", q, v, bias, problem, problem.plan is not None)
    block, length = config.block_m, terms.shape[2]
    # The difference of row and column at the table's begin, in a tile on the diagonal 0.
    begin = (0 if causal else 1 - problem.n_query) - 1
    if sequences is None:
        begin -= problem.n_key - problem.n_query
        diagonals = (begin + length - 1) // block - begin // block + 2
    else:
        _, n_query, _, n_key, shift = sequences.rows.unbind(1)
        begin = (begin + n_query - n_key - shift)[:, None, None]
        diagonals = (length + block - 2) // block + 2
    first = begin // block
    place = torch.arange(length, device=q.device) + (begin - first * block)

    parts = [slice(None)]
    if sequences is not None and sequences.is_packed:
        step = max(1, _TABLE_SUMS // (q.shape[1] * diagonals * 2 * block))
        batch = len(sequences.rows)
        parts = [slice(b, min(b + step, batch)) for b in range(0, batch, step)] or parts
    gradients = []
    for part in parts:
        own, own_first, own_place = problem, first, place
        if sequences is not None:
            rows_of_part, plan = sequences.rows[part], plans.of_entries(problem.plan, part)
            own = problem._replace(sequences=rows_of_part, plan=plan)
            own_first, own_place = first[part].int(), place[part]
        batch = _batch(q, sequences) if part == slice(None) else part.stop - part.start
        sums = q.new_empty((batch, q.shape[1], diagonals, 2, block), dtype=torch.float32)
        _launch(attn_bwd_table_kernel, (batch * q.shape[1], diagonals), config)(
            *map(rows, given),
            sums,
            own_first,
            bias._replace(terms=of_entries(bias.terms, part)),
            own,
            length,
            BLOCK=block,
            BLOCK_D=sizes["BLOCK_D"],
            BLOCK_DV=sizes["BLOCK_DV"],
        )
        of_distances = (sums[:, :, :-1, 1] + sums[:, :, 1:, 0]).flatten(2)
        gradient = of_distances.gather(-1, own_place.expand(batch, q.shape[1], length))
        gradients.append(gradient.sum(0, keepdim=True) if terms.shape[0] == 1 else gradient)
    return sum(gradients) if terms.shape[0] == 1 else torch.cat(gradients)


def _sum_of_rows(x: Tensor, entries: int, sequences: Sequences | None) -> Tensor:
    """(B, H, n) to (B, H) float64; packed, to those of each sequence where entries are many."""
    if sequences is None or not sequences.is_packed or entries == 1:
        return x.sum(-1, dtype=torch.float64)
    each = x.split(sequences.rows[:, 1].tolist(), -1)
    return torch.cat([one.sum(-1, dtype=torch.float64) for one in each])


def _sums_gradient(of_queries: Tensor, of_keys: Tensor, sequences: Sequences | None) -> Tensor:
    """(B, H, places) float64, of C[p] of each query and C[j] of each key."""
    gradient = of_keys.double()
    if sequences is not None and (sequences.is_packed or sequences.longest_shift):
        # Each place has at most one query, and queries before the first key have one at the end.
        room = torch.nn.functional.pad(gradient, (0, sequences.places + 1 - gradient.shape[-1]))
        place = sequences.keys_of_queries().unsqueeze(-2).expand(of_queries.shape)
        return room.scatter_add_(-1, place, of_queries.double())[..., :-1]
    shown = min(of_queries.shape[2], of_keys.shape[2])
    gradient[..., of_keys.shape[2] - shown :] += of_queries[..., of_queries.shape[2] - shown :]
    return gradient
