"""The gradients of the operands of a bias, accumulated over the tiles of a block.

A block of queries has two: that of the gains, [BLOCK_M], and that of the other operands: the
vectors of the queries, [BLOCK_M, padded rank], intercepts and slopes, [2, segments], or the prefix
sums, divided by the gains, [BLOCK_M]. A block of keys has one: that of the vectors of the keys,
[BLOCK_N, padded rank], or the prefix sums, [BLOCK_N]. The gradient of a pair is its dS.

queries, keys: see attention/logits.py. IN_TWO: see times_factors.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ..primitives import position, row_address, store_tile
from .factors import round_to_operand
from .relative import add_vector_gradients, padded_rank
from .segments import add_segment_gradients
from .tile import negate_future, pair_address, pairs, table_values


@triton.jit
def query_gradients(bias, BLOCK_M: tl.constexpr):
    """Returns the gradients of a block of queries, 0."""
    others = tl.zeros([BLOCK_M], tl.float32)
    if bias.function is not None:
        others = tl.zeros([2, bias.function.segments], tl.float32)
    elif bias.vector_tables is not None:
        others = tl.zeros([BLOCK_M, padded_rank(bias.vector_tables.query_rank)], tl.float32)
    return tl.zeros([BLOCK_M], tl.float32), others


@triton.jit
def add_query_gradients(
    bias, problem, b, h, queries, keys, sees, grad_s, gradients, grad_pairs, IN_TWO: tl.constexpr
):
    """Adds the dS of a tile, [BLOCK_M, BLOCK_N], to the gradients of its queries."""
    of_gain, others = gradients
    p, j, _, _ = pairs(bias, queries, keys, False)
    if bias.of_pairs is not None:
        i = p - position(problem, 0)
        exists = (i < problem.n_query) & (j < problem.n_key)
        tl.store(pair_address(grad_pairs, b, h, i, j), grad_s, exists)
    elif bias.function is not None:
        t = table_values(bias, problem, b, h, p, j, sees)
        of_gain, others = add_segment_gradients(
            bias.function, b, h, t, queries[1], grad_s, of_gain, others
        )
    elif bias.vector_tables is not None:
        others = add_vector_gradients(
            *(bias, problem, h, bias.vector_tables.queries, queries, keys, grad_s, others),
            *(bias.vector_tables.query_rank, False),
        )
    else:
        of_gains, of_sums = beta_gradients(bias, problem, queries, keys, grad_s, IN_TWO, False)
        of_gain += tl.sum(of_gains, 1)
        others += tl.sum(of_sums, 1)
    return of_gain, others


@triton.jit
def store_query_gradients(bias, problem, b, h, first, gain, gradients, grad_gain, grad_others):
    """Stores the gradients of the block of queries first, first + 1, ..."""
    of_gain, others = gradients
    BLOCK_M: tl.constexpr = of_gain.shape[0]
    i = first + tl.arange(0, BLOCK_M)
    exists = i < problem.n_query
    if bias.slopes is not None or bias.gain is not None:
        tl.store(row_address(grad_gain, b, h, 0) + i, of_gain, exists)
    if bias.function is not None:
        SEGMENTS: tl.constexpr = others.shape[1]
        n = tl.arange(0, 2)[:, None] * SEGMENTS + tl.arange(0, SEGMENTS)[None, :]
        tl.store(row_address(grad_others, b, h, first // BLOCK_M) + n, others)
    elif bias.vector_tables is not None:
        store_tile(
            *(grad_others, b, h, first, problem.n_query, others, bias.vector_tables.query_rank)
        )
    else:
        tl.store(row_address(grad_others, b, h, 0) + i, others * gain, exists)


@triton.jit
def key_gradients(bias, BLOCK_N: tl.constexpr):
    """Returns the gradient of a block of keys, 0."""
    gradient = tl.zeros([BLOCK_N], tl.float32)
    if bias.vector_tables is not None:
        gradient = tl.zeros([BLOCK_N, padded_rank(bias.vector_tables.key_rank)], tl.float32)
    return gradient


@triton.jit
def add_key_gradients(bias, problem, h, queries, keys, grad_s, gradient, IN_TWO: tl.constexpr):
    """Adds the dS of a tile, [BLOCK_N, BLOCK_M], to the gradient of its keys."""
    if bias.vector_tables is not None:
        gradient = add_vector_gradients(
            *(bias, problem, h, bias.vector_tables.keys, queries, keys, grad_s, gradient),
            *(bias.vector_tables.key_rank, True),
        )
    else:
        _, of_sums = beta_gradients(bias, problem, queries, keys, grad_s, IN_TWO, True)
        gradient -= tl.sum(of_sums * queries[1][None, :], 1)
    return gradient


@triton.jit
def store_key_gradients(bias, problem, b, h, first, gradient, grad_keys):
    """Stores the gradient of the block of keys first, first + 1, ..."""
    if bias.vector_tables is not None:
        store_tile(grad_keys, b, h, first, problem.n_key, gradient, bias.vector_tables.key_rank)
    else:
        j = first + tl.arange(0, gradient.shape[0])
        tl.store(row_address(grad_keys, b, h, 0) + j, gradient, j < problem.n_key)


@triton.jit
def beta_gradients(
    bias, problem, queries, keys, grad_s, IN_TWO: tl.constexpr, KEYS_FIRST: tl.constexpr
):
    """Returns the terms of the gradient of the gain, and those of the gradient of C[p] divided by
    the gain."""
    p, j, gain, difference = pairs(bias, queries, keys, KEYS_FIRST)
    difference = negate_future(problem, difference, p, j)
    if bias.factored:
        grad_s = round_to_operand(grad_s, IN_TWO)
    if bias.squared:
        beta = gain * difference
        # Accurate to 2^-22 for divisors up to 2^126, and 0 for larger ones.
        grad_s *= libdevice.fast_dividef(-2 * beta, 1 + beta * beta)
    return grad_s * difference, negate_future(problem, grad_s, p, j)
