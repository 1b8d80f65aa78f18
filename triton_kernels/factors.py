"""A bias beta = g_i (C[p_i] - C[j]) as factors of one more step of the product of queries and keys.

Within a tile, g_i C[j] is a product of two numbers. Each is split into three bfloat16 numbers, and
the six products of them that matter to float32 are six columns of the FACTORS that the matrix
units take at a time. What is left of beta is one number a query, which joins the softmax.

The same columns, multiplied with dS, give the sums of the gradients: those of the keys' numbers
over keys, of the queries' numbers over queries. Two more columns of the keys are 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bias import key_terms
from .primitives import FACTORS, dot, row_address, tile_addresses


@triton.jit
def in_three(x):
    """Three bfloat16 numbers that add up to x but for 2^-24 of it."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def query_factors(x):
    """[n, 1] to the columns high, high, high, middle, middle, low.  [n, FACTORS]"""
    high, middle, low = in_three(x)
    column = tl.arange(0, FACTORS)[None, :]
    zero = tl.full([1, 1], 0.0, tl.bfloat16)
    return tl.where(
        column < 3, high, tl.where(column < 5, middle, tl.where(column == 5, low, zero))
    )


@triton.jit
def key_factors(x):
    """[n, 1] to the columns high, middle, low, high, middle, high, 1, 1.  [n, FACTORS]"""
    high, middle, low = in_three(x)
    column = tl.arange(0, FACTORS)[None, :]
    is_high = (column == 0) | (column == 3) | (column == 5)
    is_middle = (column == 1) | (column == 4)
    rest = tl.where((column == 6) | (column == 7), 1.0, 0.0).to(tl.bfloat16)
    return tl.where(is_high, high, tl.where(is_middle, middle, tl.where(column == 2, low, rest)))


@triton.jit
def signed_query_factors(bias, problem, gain, SIDE: tl.constexpr):
    """Of -SIDE gain / scale, where the bias is factored. [BLOCK_M, FACTORS]"""
    factors = gain
    if bias.factored:
        factors = query_factors((gain * (-SIDE / problem.scale))[:, None])
    return factors


@triton.jit
def linear_key_factors(bias, BLOCK_N: tl.constexpr):
    """Those of any tile, where the bias is linear. [BLOCK_N, FACTORS]"""
    factors = tl.arange(0, BLOCK_N).to(tl.float32)
    if bias.factored and bias.form == "linear":
        factors = key_factors(factors[:, None])
    return factors


@triton.jit
def tile_key_factors(bias, b, h, first, of_linear, BLOCK_N: tl.constexpr, EDGE: tl.constexpr):
    """Those of the keys from first on, all of which are there. [BLOCK_N, FACTORS]"""
    factors = of_linear
    if bias.factored and bias.form == "cumulative" and not EDGE:
        factors = tl.load(tile_addresses(bias.key_factors, b, h, first, BLOCK_N, FACTORS))
    return factors


@triton.jit
def tile_query_factors(bias, b, h, first, of_head, BLOCK_M: tl.constexpr, SIDE: tl.constexpr):
    """Those of the queries from first on, all of which are there. [BLOCK_M, FACTORS]"""
    factors = of_head
    if bias.query_factors is not None:
        factors = tl.load(tile_addresses(bias.query_factors, b, h, first, BLOCK_M, FACTORS))
        if SIDE < 0:
            factors = (-factors.to(tl.float32)).to(tl.bfloat16)
    return factors


@triton.jit
def query_factors_kernel(factors, bias, problem, BLOCK_M: tl.constexpr):
    """The query factors of a bias with a gain for each query, (B or 1, H or 1, Nq, FACTORS)."""
    b, h = tl.program_id(0), tl.program_id(1)
    first = tl.program_id(2) * BLOCK_M
    i = first + tl.arange(0, BLOCK_M)
    exists = i < problem.n_query
    gain = tl.load(row_address(bias.gain, b, h, 0) + i, exists, other=0.0)
    address = tile_addresses(factors, b, h, first, BLOCK_M, FACTORS)
    tl.store(address, signed_query_factors(bias, problem, gain, SIDE=1), exists[:, None])


@triton.jit
def key_factors_kernel(factors, bias, problem, BLOCK_N: tl.constexpr):
    """The key factors of a cumulative bias's tiles, (B or 1, H or 1, Nk, FACTORS)."""
    b, h = tl.program_id(0), tl.program_id(1)
    first = tl.program_id(2) * BLOCK_N
    _, sums = key_terms(bias, b, h, first, problem.n_key, BLOCK_N)
    exists = first + tl.arange(0, BLOCK_N)[:, None] < problem.n_key
    address = tile_addresses(factors, b, h, first, BLOCK_N, FACTORS)
    tl.store(address, key_factors(sums[:, None]), exists)


@triton.jit
def times_factors(grad_s, factors, acc, IN_TWO: tl.constexpr):
    """acc + grad_s factors. IN_TWO: for float16 inputs, which have more bits than a bfloat16."""
    high = grad_s.to(tl.bfloat16)
    acc = dot(high, factors, acc)
    if IN_TWO:
        acc = dot((grad_s - high.to(tl.float32)).to(tl.bfloat16), factors, acc)
    return acc


@triton.jit
def query_gradient_weights(from_tile, SIDE: tl.constexpr):
    """What the columns of dS times key factors count in the queries' sums. [BLOCK_M, FACTORS]

    Columns 0 to 6 add up to sum_j dS_ij SIDE (from_tile_i - c_j), column 7 to sum_j SIDE dS_ij.
    """
    column = tl.arange(0, FACTORS)[None, :]
    constant = tl.where(column < 3, -SIDE, tl.where(column == 7, SIDE, 0)).to(tl.float32)
    return tl.where(column == 6, SIDE * from_tile[:, None], constant)


@triton.jit
def query_gradient_sums(sums):
    """The gradients of the gain and, still to be multiplied by it, of C[p]. [BLOCK_M] each."""
    of_sums = tl.arange(0, FACTORS)[None, :] == 7
    return tl.sum(tl.where(of_sums, 0.0, sums), 1), tl.sum(tl.where(of_sums, sums, 0.0), 1)


@triton.jit
def key_gradient_sums(problem, sums):
    """The gradient of C[j], from dS times query factors, which hold -SIDE gain / scale."""
    column = tl.arange(0, FACTORS)[None, :]
    parts = (column == 0) | (column == 3) | (column == 5)
    return tl.sum(tl.where(parts, sums, 0.0), 1) * problem.scale
