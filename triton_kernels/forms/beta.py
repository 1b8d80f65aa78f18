"""The forms that are functions of beta_ij = g_i (C[p_i] - C[j]), negated for keys after the query:
`linear`, `cumulative`, and -log(1 + beta^2)."""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ...forms.cumulative import in_float32
from ...forms.gradients import sum_of_rows, sums_gradient
from ..bias.factors import round_to_operand
from ..bias.gradients import QueryGradients
from ..bias.tile import negate_future, pairs_of
from ..operands import FormFunctions
from ..primitives import LN2, LOG2E, limited_gain, row_address
from .base import Gathered, Kernels, always


@triton.jit
def log2(x):
    """log2(x), accurate to 2^-22. tl.log2 is more accurate, but takes eighteen instructions."""
    return libdevice.fast_log2f(x)


@triton.jit
def tile_beta(head, queries, keys, pairs, sees, KEYS_FIRST: tl.constexpr):
    beta = pairs.gain * negate_future(head.problem, pairs.difference, pairs)
    return beta * LOG2E


@triton.jit
def tile_log1p_square(head, queries, keys, pairs, sees, KEYS_FIRST: tl.constexpr):
    beta = limited_gain(pairs.gain * negate_future(head.problem, pairs.difference, pairs))
    return -log2(1 + beta * beta)


@triton.jit
def beta_of_page(head, queries, keys, sees):
    if head.bias.sums is None:
        difference = (queries.p[:, None] - keys.j[None, :]).to(tl.float32)
    else:
        # Prefix sums are subtracted in float64, which is exact for near pairs at any position.
        address = row_address(head.bias.sums, keys.page, head.h, keys.row)[:, None]
        sums = tl.load(address + tl.arange(0, keys.j.shape[0])[None, :], sees, 0.0)
        difference = (queries.sums[:, None] - sums).to(tl.float32)
    return queries.gain[:, None] * difference


@triton.jit
def page_beta(head, queries, keys, sees, REAL: tl.constexpr):
    return beta_of_page(head, queries, keys, sees) * LOG2E


@triton.jit
def page_log1p_square(head, queries, keys, sees, REAL: tl.constexpr):
    beta = limited_gain(beta_of_page(head, queries, keys, sees))
    return -log2(1 + beta * beta)


@triton.jit
def highest_linear(head, bounds, queries, tiles):
    slope = queries.gain[:, None].to(tl.float64)  # the negative of the slope
    return slope * tl.where(slope < 0, tiles.nearest, tiles.farthest).to(tl.float64)


@triton.jit
def extreme_betas(head, bounds, queries, tiles):
    """Returns beta for the smallest and for the largest prefix sum of each tile."""
    h, page, place = head.h[:, None], tiles.page[None, :], tiles.place[None, :]
    low = tl.load(row_address(bounds.lowest, page, h, 0) + place)
    high = tl.load(row_address(bounds.highest, page, h, 0) + place)
    gain, sums = queries.gain[:, None].to(tl.float64), queries.sums[:, None]
    return gain * (sums - low), gain * (sums - high)


@triton.jit
def highest_beta(head, bounds, queries, tiles):
    from_low, from_high = extreme_betas(head, bounds, queries, tiles)
    return tl.maximum(from_low, from_high)


@triton.jit
def highest_log1p_square(head, bounds, queries, tiles):
    from_low, from_high = extreme_betas(head, bounds, queries, tiles)
    least = tl.minimum(tl.abs(from_low), tl.abs(from_high))
    least = tl.where((from_low < 0) == (from_high < 0), least, 0.0)
    least = limited_gain(least.to(tl.float32))
    return (-log2(1 + least * least) * LN2).to(tl.float64)


@triton.jit
def grad_of_beta(head, pairs, difference, grad_s, IN_TWO: tl.constexpr):
    return round_to_operand(grad_s, IN_TWO) if head.bias.factored else grad_s


@triton.jit
def grad_of_squared_beta(head, pairs, difference, grad_s, IN_TWO: tl.constexpr):
    beta = pairs.gain * difference
    # Accurate to 2^-22 for divisors up to 2^126, and 0 for larger ones.
    return grad_s * libdevice.fast_dividef(-2 * beta, 1 + beta * beta)


@triton.jit
def add_query_gradients(head, queries, keys, tile, gradients, grad_pairs, IN_TWO: tl.constexpr):
    """Adds a tile to the gradients of the gains, and of C[p] divided by the gains."""
    pairs = pairs_of(head, queries, keys, False)
    difference = negate_future(head.problem, pairs.difference, pairs)
    grad_beta = head.bias.form.grad_beta(head, pairs, difference, tile.grad_s, IN_TWO)
    grad_sums = negate_future(head.problem, grad_beta, pairs)
    gain = gradients.gain + tl.sum(grad_beta * difference, 1)
    return QueryGradients(gain, gradients.others + tl.sum(grad_sums, 1))


@triton.jit
def store_query_gradients(head, first, queries, gradients, grad_gain, grad_others):
    i = first + tl.arange(0, gradients.gain.shape[0])
    exists = i < head.problem.n_query
    if head.bias.slopes is not None or head.bias.gain is not None:
        tl.store(row_address(grad_gain, head.b, head.h, 0) + i, gradients.gain, exists)
    address = row_address(grad_others, head.b, head.h, 0) + i
    tl.store(address, gradients.others * queries.gain, exists)


@triton.jit
def add_key_gradients(head, queries, keys, grad_s, gradients, IN_TWO: tl.constexpr):
    """Adds a tile to the gradients of C[j]."""
    pairs = pairs_of(head, queries, keys, True)
    difference = negate_future(head.problem, pairs.difference, pairs)
    grad_beta = head.bias.form.grad_beta(head, pairs, difference, grad_s, IN_TWO)
    grad_sums = negate_future(head.problem, grad_beta, pairs)
    return gradients - tl.sum(grad_sums * queries.gain[None, :], 1)


@triton.jit
def store_key_gradients(head, first, gradients, grad_keys):
    j = first + tl.arange(0, gradients.shape[0])
    address = row_address(grad_keys, head.b, head.h, 0) + j
    tl.store(address, gradients, j < head.problem.n_key)


def _sums(sums: Tensor, *gain: Tensor) -> dict:
    return dict(zip(("high", "low"), in_float32(sums), strict=True))


def _slopes_gradients(gathered: Gathered) -> list[Tensor]:
    (slopes,) = gathered.problem.form.tensors
    return [-sum_of_rows(gathered.grad_gain, slopes.shape[0], gathered.problem.sequences)]


def _sums_gradients(gathered: Gathered) -> list[Tensor]:
    sequences = gathered.problem.sequences
    grad_sums = sums_gradient(gathered.grad_others, gathered.grad_keys, sequences)
    return [grad_sums, gathered.grad_gain][: len(gathered.problem.form.tensors)]


_BETA = FormFunctions(
    tile_bias=tile_beta,
    page_bias=page_beta,
    highest_bias=highest_beta,
    add_query_gradients=add_query_gradients,
    store_query_gradients=store_query_gradients,
    add_key_gradients=add_key_gradients,
    store_key_gradients=store_key_gradients,
    grad_beta=grad_of_beta,
)
_SQUARED = _BETA._replace(
    tile_bias=tile_log1p_square,
    page_bias=page_log1p_square,
    highest_bias=highest_log1p_square,
    grad_beta=grad_of_squared_beta,
)
LINEAR = Kernels(
    ("slopes",),
    _BETA._replace(highest_bias=highest_linear),
    _slopes_gradients,
    may_be_factored=always,
    trains_queries=True,
)
CUMULATIVE = Kernels(
    ("sums", "gain"),
    _BETA,
    _sums_gradients,
    _sums,
    may_be_factored=always,
    trains_queries=True,
    trains_keys=True,
)
LOG1P_SQUARE = replace(
    CUMULATIVE, functions=_SQUARED, may_be_factored=lambda block_m, *tensors: False
)
