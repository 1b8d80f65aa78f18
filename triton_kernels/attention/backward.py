"""Code shared by the backward kernels: statistics of the queries, and P and dS of a tile.

    P_ij  = exp(s_ij - lse_i)
    D_i   = grad_o_i . o_i - grad_lse_i
    dS_ij = P_ij (grad_o_i . v_j - D_i), the gradient of the logits and so of the bias

backward_queries.py computes the gradients of queries and backward_keys.py those of keys. Each
recomputes P and dS, so that every output is written by one program, without atomics.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..operands import Strided
from ..primitives import (
    INFINITY,
    along,
    dot,
    limited_gain,
    load_keys,
    load_numbers,
    load_queries,
    load_tile,
    row_address,
)
from ..sequences import sequence_keys, sequence_queries
from .logits import tile_logits

# In base 2. Beyond it float32 rounds by 1 or more.
LARGEST_LSE = tl.constexpr(2.0**24)


class Inputs(NamedTuple):
    """What the backward kernels read, restricted to one sequence."""

    q: Strided
    k: Strided
    v: Strided
    grad_o: Strided
    lse_in_base_2: Strided
    delta: Strided


class Statistics(NamedTuple):
    """lse in base 2 and D of the queries of a tile."""

    lse: tl.tensor
    delta: tl.tensor


class Tiles(NamedTuple):
    """The tiles of the inputs that P and dS are computed from."""

    q: tl.tensor
    k: tl.tensor
    v: tl.tensor
    grad_o: tl.tensor


class PairGradients(NamedTuple):
    """P, dS and the visibility mask of a tile."""

    p: tl.tensor
    grad_s: tl.tensor
    sees: tl.tensor


@triton.jit
def attn_bwd_delta_kernel(
    o,
    grad_o,
    pivot,
    log_sum,
    grad_lse,
    lse_in_base_2,
    delta,
    gain,
    problem,
    LIMITS_GAIN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Writes lse in base 2 and D_i = grad_o_i . o_i - grad_lse_i, interleaved with the gain of the
    query if the bias has gains.

    Queries without weights get lse = inf, so that their P is 0, and D = 0. The same lse is that of
    queries whose weights would be wrong by the factor 2, as lse is rounded.
    """
    b, h = tl.program_id(0) // problem.heads, tl.program_id(0) % problem.heads
    first = tl.program_id(1) * BLOCK_M
    i = first + tl.arange(0, BLOCK_M)
    exists = i < problem.n_query
    # [BLOCK_M, BLOCK_DV]
    tile_o = load_tile(o, b, h, first, problem.n_query, problem.value_dim, BLOCK_M, BLOCK_DV)
    tile_do = load_tile(grad_o, b, h, first, problem.n_query, problem.value_dim, BLOCK_M, BLOCK_DV)
    # [BLOCK_M]
    pivots = tl.load(row_address(pivot, b, h, 0) + i, exists, other=0.0)
    log_sums = tl.load(row_address(log_sum, b, h, 0) + i, exists, other=-INFINITY)
    cotangents = tl.load(row_address(grad_lse, b, h, 0) + i, exists, other=0.0)
    empty = log_sums == -INFINITY
    d = tl.sum(tile_o.to(tl.float32) * tile_do.to(tl.float32), 1) - cotangents
    values = pivots + log_sums
    values = tl.where(tl.abs(values) > LARGEST_LSE, INFINITY, values)
    address = row_address(delta, b, h, first) + tl.arange(0, BLOCK_M) * delta.row
    tl.store(address, tl.where(empty, 0.0, d), exists)
    if gain is not None:
        gains = tl.load(row_address(gain, b, h, 0) + i, exists)
        tl.store(address + 1, limited_gain(gains) if LIMITS_GAIN else gains, exists)
    tl.store(row_address(lse_in_base_2, b, h, 0) + i, values, exists)


@triton.jit
def sequence_inputs(q, k, v, grad_o, lse_in_base_2, delta, problem, b):
    """Returns the Inputs of sequence b."""
    return Inputs(
        sequence_queries(q, problem, b),
        sequence_keys(k, problem, b),
        sequence_keys(v, problem, b),
        sequence_queries(grad_o, problem, b),
        sequence_queries(lse_in_base_2, problem, b),
        sequence_queries(delta, problem, b),
    )


@triton.jit
def load_tiles(
    inputs, head, i, j, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr
):
    """Returns the Tiles of queries i, i + 1, ... and keys j, j + 1, ..."""
    # Loaded in this order, the tiles of attn_bwd_table_kernel leave enough registers on sm_80.
    # [BLOCK, BLOCK_D], [BLOCK, BLOCK_DV]
    q = load_queries(inputs.q, head, i, head.problem.head_dim, BLOCK, BLOCK_D)
    grad_o = load_queries(inputs.grad_o, head, i, head.problem.value_dim, BLOCK, BLOCK_DV)
    k = load_keys(inputs.k, head, j, head.problem.head_dim, BLOCK, BLOCK_D)
    v = load_keys(inputs.v, head, j, head.problem.value_dim, BLOCK, BLOCK_DV)
    return Tiles(q, k, v, grad_o)


@triton.jit
def query_statistics(inputs, head, first, BLOCK_M: tl.constexpr, EDGE: tl.constexpr = True):
    """Returns the Statistics of queries first, first + 1, ..., inf and 0 beyond the last query."""
    lse = load_numbers(inputs.lse_in_base_2, head, first, INFINITY, BLOCK_M, EDGE)
    return Statistics(lse, load_numbers(inputs.delta, head, first, 0.0, BLOCK_M, EDGE))


@triton.jit
def delta_and_gain(delta, head, first, BLOCK_M: tl.constexpr, EDGE: tl.constexpr):
    """Returns D and the gains interleaved with it, [BLOCK_M] each, or 0 beyond the last query."""
    n = tl.arange(0, BLOCK_M)[:, None]
    exists = first + n < head.problem.n_query if EDGE else tl.full([BLOCK_M, 1], True, tl.int1)
    address = row_address(delta, head.b, head.h, 0) + 2 * first
    address += 2 * n + tl.arange(0, 2)[None, :]
    return tl.split(tl.load(address, exists, other=0.0))


@triton.jit
def weights_and_gradients(
    head,
    tiles,
    queries,
    keys,
    offset,
    delta,
    initial,
    MASKED: tl.constexpr,
    FACTORED: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):
    """Returns the PairGradients of a tile, [BLOCK_M, BLOCK_N], or [BLOCK_N, BLOCK_M] with
    KEYS_FIRST. P and dS are 0 where masked.

    offset: the terms of the logits in base 2 that are constant along the keys, -lse included;
    [BLOCK_M] or a scalar. initial: see tile_logits.
    """
    logits = tile_logits(
        head, tiles.q, tiles.k, queries, keys, initial, MASKED, FACTORED, KEYS_FIRST
    )
    p = tl.exp2(logits.x * logits.multiplier + along(offset, KEYS_FIRST))
    if KEYS_FIRST:
        grad_p = dot(tiles.v, tl.trans(tiles.grad_o))
    else:
        grad_p = dot(tiles.grad_o, tl.trans(tiles.v))
    grad_s = p * (grad_p - along(delta, KEYS_FIRST))
    if MASKED:
        p, grad_s = tl.where(logits.sees, p, 0.0), tl.where(logits.sees, grad_s, 0.0)
    return PairGradients(p, grad_s, logits.sees)
