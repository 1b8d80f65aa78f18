"""The bias of a tile, and its gradient, from what a form holds.

"linear" and "cumulative" are both beta = g_i (C[p_i] - C[j]), its sign turned for keys after the
query: a linear bias has the gain -slope and a step of 1 a key. C is taken relative to the tile's
first key, in float64, before it is rounded to float32.

Functions that take vectors of queries (p, gain, from_tile) and of keys (j, key_sums) broadcast
them: the caller lays queries along rows or along columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from .primitives import INTERPRETED, LOG2E, row_address


@triton.jit
def shared_gain(bias, b, h, BLOCK_M: tl.constexpr):
    """The gain of all queries of a head, where they have one in common. [BLOCK_M]"""
    gain = tl.full([BLOCK_M], 1.0, tl.float32)
    if bias.form == "linear":
        gain *= -tl.load(row_address(bias.terms, b, h, 0))
    return gain


@triton.jit
def key_terms(bias, b, h, first, n_key, BLOCK_N: tl.constexpr):
    """C[first], and C[first + c] - C[first] in float32, [BLOCK_N]."""
    column = tl.arange(0, BLOCK_N)
    origin, key_sums = first, column.to(tl.float32)
    if bias.form == "cumulative":
        address = row_address(bias.terms, b, h, first)
        origin = tl.load(address)
        sums = tl.load(address + column, first + column < n_key, other=0.0)
        key_sums = (sums - origin).to(tl.float32)
    return origin, key_sums


@triton.jit
def turned(problem, x, p, j):
    """x, its sign turned for keys after the query."""
    if not problem.causal:
        x = tl.where(p < j, -x, x)
    return x


@triton.jit
def tile_bias(bias, problem, b, h, p, j, gain, from_tile, key_sums, sees):
    """In base 2; from_tile is C[p] - C[first key]. Any number where sees is False."""
    if bias.form == "none":
        values = 0.0
    elif bias.form == "distance":
        first_distance = 0 if problem.causal else 1 - problem.n_query
        values = tl.load(row_address(bias.terms, b, h, 0) + (p - j - first_distance), sees)
    else:
        beta = gain * turned(problem, from_tile - key_sums, p, j)
        values = -log2(1 + beta * beta) if bias.squared else beta * LOG2E
    return values


@triton.jit
def log2(x):
    """Accurate to 2^-22, which tl.log2 betters at eighteen instructions a number."""
    return tl.log2(x) if INTERPRETED else libdevice.fast_log2f(x)


@triton.jit
def tile_gradients(bias, problem, grad_logits, p, j, gain, from_tile, key_sums):
    """The terms of the gradients of the gain and, still to be multiplied by it, of C[p]."""
    difference = turned(problem, from_tile - key_sums, p, j)
    if bias.squared:
        beta = gain * difference
        grad_logits *= -2 * beta / (1 + beta * beta)
    return grad_logits * difference, turned(problem, grad_logits, p, j)
