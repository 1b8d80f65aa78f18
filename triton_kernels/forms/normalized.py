"""The form `normalized`: a piecewise linear function of a gain times an entry of a table.

attention/backward_table.py has the gradient of the table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from ..bias.gradients import QueryGradients
from ..bias.segments import add_segment_gradients, largest_value, values_of
from ..bias.tile import pairs_of, table_values
from ..operands import Bias, FormFunctions, Function, padded_table, per_head
from ..primitives import LOG2E, in_base_2, row_address
from .base import Gathered, Kernels


@triton.jit
def tile_bias(head, queries, keys, pairs, sees, KEYS_FIRST: tl.constexpr):
    x = pairs.gain * table_values(head, pairs, sees, 0.0)
    return values_of(head.bias.function, head.b, head.h, x) * LOG2E


@triton.jit
def page_bias(head, queries, keys, sees, REAL: tl.constexpr):
    # In float64, so that tiles may be skipped by bounds that ignore its rounding errors.
    table = row_address(head.bias.table, head.b, head.h, 0)[:, None]
    values = tl.load(table + (queries.p[:, None] - keys.j[None, :]), sees, 0.0)
    x = queries.gain[:, None].to(tl.float64) * values
    return in_base_2(values_of(head.bias.function, head.b, head.h[:, None], x))


@triton.jit
def highest_bias(head, bounds, queries, tiles):
    h, gain = head.h[:, None], queries.gain[:, None].to(tl.float64)
    low = row_address(bounds.table_lowest, head.b, h, 0)
    high = row_address(bounds.table_highest, head.b, h, 0)
    near, far = tiles.near_block, tiles.far_block
    low = tl.minimum(tl.load(low + near), tl.load(low + far)).to(tl.float64)
    high = tl.maximum(tl.load(high + near), tl.load(high + far)).to(tl.float64)
    low, high = gain * low, gain * high
    low, high = tl.minimum(low, high), tl.maximum(low, high)
    return largest_value(head.bias.function, head.b, h, low, high)


@triton.jit
def no_query_gradients(head, BLOCK_M: tl.constexpr):
    lines = tl.zeros([2, head.bias.function.segments], tl.float32)
    return QueryGradients(tl.zeros([BLOCK_M], tl.float32), lines)


@triton.jit
def add_query_gradients(head, queries, keys, tile, gradients, grad_pairs, IN_TWO: tl.constexpr):
    """Adds a tile to the gradients of the gains, and of intercepts and slopes, [2, segments]."""
    t = table_values(head, pairs_of(head, queries, keys, False), tile.sees, 0.0)
    gain, lines = add_segment_gradients(
        head, t, queries.gain, tile.grad_s, gradients.gain, gradients.others
    )
    return QueryGradients(gain, lines)


@triton.jit
def store_query_gradients(head, first, queries, gradients, grad_gain, grad_others):
    BLOCK_M: tl.constexpr = gradients.gain.shape[0]
    SEGMENTS: tl.constexpr = gradients.others.shape[1]
    i = first + tl.arange(0, BLOCK_M)
    address = row_address(grad_gain, head.b, head.h, 0) + i
    tl.store(address, gradients.gain, i < head.problem.n_query)
    n = tl.arange(0, 2)[:, None] * SEGMENTS + tl.arange(0, SEGMENTS)[None, :]
    tl.store(row_address(grad_others, head.b, head.h, first // BLOCK_M) + n, gradients.others)


def _function(
    table: Tensor, gain: Tensor, knots: Tensor, slopes: Tensor, intercepts: Tensor
) -> Function:
    count = knots.shape[2]
    segments = constexpr(triton.next_power_of_2(count + 1))
    return Function(*map(per_head, (knots, slopes, intercepts)), count, segments)


def _gradient_shapes(bias: Bias, problem, blocks: int) -> dict:
    segments = bias.function.segments.value
    return {"grad_others": (problem.batch, problem.q.shape[1], blocks, 2 * segments)}


def _gradients(gathered: Gathered) -> list[Tensor]:
    _, _, knots, slopes, _ = gathered.problem.form.tensors
    grad_lines = gathered.grad_others.sum(2).unflatten(2, (2, -1))
    grad_intercepts, grad_slopes = grad_lines[..., : slopes.shape[2]].unbind(2)
    grad_knots = torch.zeros_like(knots)
    return [gathered.table(), gathered.grad_gain, grad_knots, grad_slopes, grad_intercepts]


NORMALIZED = Kernels(
    ("table", "gain"),
    FormFunctions(
        tile_bias=tile_bias,
        page_bias=page_bias,
        highest_bias=highest_bias,
        no_query_gradients=no_query_gradients,
        add_query_gradients=add_query_gradients,
        store_query_gradients=store_query_gradients,
    ),
    _gradients,
    lambda table, *others: {"table": padded_table(table)},
    gradient_shapes=_gradient_shapes,
    trains_queries=True,
    function=_function,
)
