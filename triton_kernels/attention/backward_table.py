"""The gradient of a distance table: sums of dS along diagonals."""

from __future__ import annotations

import triton
import triton.language as tl

from ..bias.segments import slopes_of, values_of
from ..bias.tile import first_distance, gains
from ..operands import Head
from ..primitives import (
    INFINITY,
    LOG2E,
    dot,
    plan_range,
    position,
    row_address,
)
from ..sequences import (
    SequenceBias,
    SequenceProblem,
    per_token_operands,
    sequence_lengths,
)
from .backward import load_tiles, query_statistics, sequence_inputs


@triton.jit
def tile_gradient(
    inputs,
    head,
    i,
    j,
    table,
    in_table,
    first_key,
    end_key,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Returns the gradient of the table's entries from the tile of queries i, i + 1, ... and keys
    j, j + 1, ..., whose entries are `table`; 0 where masked."""
    BLOCK: tl.constexpr = table.shape[0]
    tile_bias = table
    if head.bias.function is not None:
        gain = gains(head, i, BLOCK)[:, None]
        tile_bias = values_of(head.bias.function, head.b, head.h, gain * table) * LOG2E
        tile_bias = tl.where(in_table, tile_bias, -INFINITY)
    tiles = load_tiles(inputs, head, i, j, BLOCK, BLOCK_D, BLOCK_DV)
    statistics = query_statistics(inputs, head, i, BLOCK)
    x = dot(tiles.q, tl.trans(tiles.k)) * head.problem.scale_in_base_2 + tile_bias
    p = tl.exp2(x - statistics.lse[:, None])
    grad_s = p * (dot(tiles.grad_o, tl.trans(tiles.v)) - statistics.delta[:, None])
    IS_BOUNDED: tl.constexpr = head.problem.plan is None and head.problem.sequences is None
    if not IS_BOUNDED or not head.problem.causal:
        key = (j + tl.arange(0, BLOCK))[None, :]
        grad_s = tl.where((first_key <= key) & (key < end_key), grad_s, 0.0)
    if head.bias.function is not None:
        grad_s *= gain * slopes_of(head.bias.function, head.b, head.h, gain * table)
    return grad_s


@triton.jit
def diagonal_sums(
    inputs,
    partial,
    diagonal,
    head,
    length,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Computes attn_bwd_table_kernel for one sequence."""
    begin = tl.maximum(diagonal, 0)
    query_tiles, key_tiles = (
        tl.cdiv(head.problem.n_query, BLOCK),
        tl.cdiv(head.problem.n_key, BLOCK),
    )
    end = tl.minimum(query_tiles, key_tiles + diagonal)
    r, c = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    # The table contains exactly the distances of visible pairs. [BLOCK, BLOCK]
    place = position(head.problem, diagonal * BLOCK) + r - c - first_distance(head.problem)
    in_table = (place >= 0) & (place < length)
    missing = 0.0 if head.bias.function is not None else -INFINITY
    address = row_address(head.bias.table, head.b, head.h, 0) + place
    table = tl.load(address, in_table, other=missing)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for tile in range(begin, end):
        i, j = tile * BLOCK, (tile - diagonal) * BLOCK
        first_key, end_key = plan_range(head, i)
        if head.problem.plan is None or (first_key < j + BLOCK) & (j < end_key):
            acc += tile_gradient(
                inputs,
                head,
                i,
                j,
                table,
                in_table,
                first_key,
                end_key,
                BLOCK_D,
                BLOCK_DV,
            )

    # Rotate row r right by r + 1: each column then holds one value of r - c modulo BLOCK.
    rotated = tl.gather(acc, (r - c - 1) & (BLOCK - 1), 1)
    number = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    address = partial + number * (2 * BLOCK) + tl.arange(0, BLOCK)
    tl.store(address, tl.sum(tl.where(r <= c, rotated, 0.0), 0))
    tl.store(address + BLOCK, tl.sum(tl.where(r > c, rotated, 0.0), 0))


@triton.jit
def attn_bwd_table_kernel(
    q,
    k,
    v,
    grad_o,
    lse_in_base_2,
    delta,
    partial,
    first_diagonal,
    bias,
    problem,
    length,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Sums the gradient of the table over one diagonal of square tiles, all of which have the same
    distances. For a function of the distance it is dS; for a normalized bias dS f'(g_i t) g_i.

    Diagonal t contains the tiles of query tile I and key tile I - t. Their row r and column c have
    the distance position(t BLOCK) + r - c. It is first summed elementwise over the tiles of the
    diagonal, then along r - c: partial (B, H, diagonals, 2 BLOCK) holds at x the sum over r - c = x
    + 1 - BLOCK.

    length: the length of the table. first_diagonal: an int or, with sequences, (B,) int32.
    """
    b, h = tl.program_id(0) // problem.heads, tl.program_id(0) % problem.heads
    diagonal = tl.program_id(1)
    diagonal += first_diagonal if problem.sequences is None else tl.load(first_diagonal + b)
    inputs = sequence_inputs(q, k, v, grad_o, lse_in_base_2, delta, problem, b)
    diagonal_sums(
        inputs,
        partial,
        diagonal,
        Head(
            SequenceBias(bias, per_token_operands(bias, problem, b)),
            SequenceProblem(problem, sequence_lengths(problem, b)),
            b,
            h,
        ),
        length,
        BLOCK,
        BLOCK_D,
        BLOCK_DV,
    )
