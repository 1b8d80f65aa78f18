"""Kernels with the techniques of Triton's tutorials: loops over rows, products by groups of tiles,
locks, and tensor descriptors."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax_kernel(
    y,
    x,
    rows,
    columns,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y = softmax(x), (rows, columns). A program has every n-th row, of n programs."""
    column = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        values = tl.load(x + row * columns + column, column < columns, other=-float("inf"))
        weights = tl.exp(values - tl.max(values))
        tl.store(y + row * columns + column, weights / tl.sum(weights), column < columns)


@triton.jit
def tile_in_group(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a tile, where GROUP rows of tiles are passed through side by side."""
    in_group = GROUP * tiles_n
    first = tile // in_group * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    return first + tile % in_group % rows, tile % in_group // rows


@triton.jit
def matmul_kernel(
    a,
    b,
    c,
    m,
    n,
    k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """c = leaky_relu(a b^T), with a (m, k), b (n, k) and c (m, n)."""
    tile_m, tile_n = tile_in_group(
        tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP
    )
    row, column = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows beyond the last one are computed from others and not stored.
    a_row, b_row = a + (row % m)[:, None] * k, b + (column % n)[None, :] * k
    inner = tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        exists = inner < k - start
        tile_a = tl.load(a_row + start + inner[None, :], exists[None, :], other=0.0)
        tile_b = tl.load(b_row + start + inner[:, None], exists[:, None], other=0.0)
        sums = tl.dot(tile_a, tile_b, sums)
    sums = tl.where(sums >= 0, sums, 0.01 * sums)
    stored = (row < m)[:, None] & (column < n)[None, :]
    tl.store(c + row[:, None] * n + column[None, :], sums.to(tl.float16), stored)


@triton.jit
def persistent_matmul_kernel(
    a,
    b,
    c,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """c = a b^T by descriptors. A program computes every n-th tile, of n programs."""
    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_in_group(tile, tiles_m, tiles_n, 2)
        row, column = (tile_m * BLOCK_M).to(tl.int32), (tile_n * BLOCK_N).to(tl.int32)
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, tl.cdiv(k, BLOCK_K)):
            inner = start * BLOCK_K
            sums = tl.dot(a.load([row, inner]), b.load([column, inner]).T, sums)
        c.store([row, column], sums.to(tl.float16))


@triton.jit
def layer_norm_gradient_kernel(
    grad_x,
    grad_weight,
    grad_bias,
    grad_y,
    x,
    weight,
    mean,
    rstd,
    locks,
    columns,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of one row of x. Rows with the same number modulo GROUPS add theirs of weight
    and bias to a row of grad_weight and grad_bias, (GROUPS, columns), one after the other.

    locks: of each group, whether a program adds now, and whether one has added before.
    """
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    exists = column < columns
    of_y = tl.load(grad_y + row * columns + column, exists, other=0.0).to(tl.float32)
    normalized = tl.load(x + row * columns + column, exists, other=0.0).to(tl.float32)
    scale = tl.load(rstd + row)
    normalized = tl.where(exists, (normalized - tl.load(mean + row)) * scale, 0.0)
    weighted = of_y * tl.load(weight + column, exists, other=0.0).to(tl.float32)
    along = tl.sum(weighted * normalized) / columns
    of_x = (weighted - normalized * along - tl.sum(weighted) / columns) * scale
    tl.store(grad_x + row * columns + column, of_x.to(tl.float16), exists)

    group = row % GROUPS
    lock, has_added = locks + group, locks + GROUPS + group
    of_weight, of_bias = of_y * normalized, of_y
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    address = group * columns + column
    if tl.load(has_added) == 0:
        tl.atomic_xchg(has_added, 1)
    else:
        of_weight += tl.load(grad_weight + address, exists)
        of_bias += tl.load(grad_bias + address, exists)
    tl.store(grad_weight + address, of_weight, exists)
    tl.store(grad_bias + address, of_bias, exists)
    tl.debug_barrier()  # all threads have stored before another program may add
    tl.atomic_xchg(lock, 0)


@triton.jit
def attention_kernel(
    q,
    k,
    v,
    o,
    scale,
    length,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """o = softmax(scale q k^T) v by descriptors of (heads length, WIDTH); length is a multiple of
    the blocks."""
    first, head = tl.program_id(0) * BLOCK_M, tl.program_id(1) * length
    tile_q = q.load([head + first, 0])
    row = first + tl.arange(0, BLOCK_M)[:, None]
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    end = first + BLOCK_M if CAUSAL else length
    for start in range(0, end, BLOCK_N):
        logits = tl.dot(tile_q, k.load([head + start, 0]).T) * (scale * 1.4426950408889634)
        if CAUSAL:
            column = start + tl.arange(0, BLOCK_N)[None, :]
            logits = tl.where(row >= column, logits, -float("inf"))
        next_largest = tl.maximum(largest, tl.max(logits, 1))
        rescale = tl.exp2(largest - next_largest)
        weights = tl.exp2(logits - next_largest[:, None])
        total = total * rescale + tl.sum(weights, 1)
        tile_v = v.load([head + start, 0])
        acc = tl.dot(weights.to(tile_v.dtype), tile_v, acc * rescale[:, None])
        largest = next_largest
    o.store([head + first, 0], (acc / total[:, None]).to(tl.float16))
