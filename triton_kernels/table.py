"""The gradient of a distance table: sums of dS along its diagonals."""

from __future__ import annotations

import triton
import triton.language as tl

from .backward import query_statistics, weights_and_gradients
from .bias import shared_gain
from .logits import key_side, query_side
from .primitives import load_tile


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
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Sums over one diagonal of square tiles, which all show the same distances.

    Tile t of the diagonals holds the pairs of query tile I and key tile I - t, so the distance in
    its row r and column c is t BLOCK + n_key - n_query + r - c. dS is added up over the tiles where
    it lies; then once along r - c: partial (B, H, diagonals, 2, BLOCK) holds at [0, x] the sum of
    r - c = x + 1 - BLOCK and at [1, x] that of r - c = x + 1.
    """
    b, h = tl.program_id(0) // problem.heads, tl.program_id(0) % problem.heads
    kv_head = h // problem.group
    diagonal = first_diagonal + tl.program_id(1)
    begin = tl.maximum(diagonal, 0)
    end = tl.minimum(tl.cdiv(problem.n_query, BLOCK), tl.cdiv(problem.n_key, BLOCK) + diagonal)
    gain = shared_gain(bias, b, h, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for tile in range(begin, end):
        i, j = tile * BLOCK, (tile - diagonal) * BLOCK
        # [BLOCK, BLOCK_D], [BLOCK, BLOCK_DV]
        tile_q = load_tile(q, b, h, i, problem.n_query, problem.head_dim, BLOCK, BLOCK_D)
        tile_do = load_tile(grad_o, b, h, i, problem.n_query, problem.value_dim, BLOCK, BLOCK_DV)
        tile_k = load_tile(k, b, kv_head, j, problem.n_key, problem.head_dim, BLOCK, BLOCK_D)
        tile_v = load_tile(v, b, kv_head, j, problem.n_key, problem.value_dim, BLOCK, BLOCK_DV)
        statistics = query_statistics(lse_in_base_2, delta, problem, b, h, i, BLOCK)
        queries = query_side(bias, problem, b, h, i, gain, BLOCK)
        keys = key_side(bias, problem, b, h, j, BLOCK)
        _, grad_s = weights_and_gradients(
            *(bias, problem, b, h, tile_q, tile_k, tile_v, tile_do),
            *(statistics, queries, keys, gain, gain),
            EDGE=True,
            SIDE=1,
            KEYS_FIRST=False,
        )
        acc += grad_s

    r, x = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    # Row r turned right by r + 1 has the difference r - c, modulo BLOCK, in column x.
    turned = tl.gather(acc, (r - x - 1) & (BLOCK - 1), 1)
    number = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    address = partial + number * (2 * BLOCK) + tl.arange(0, BLOCK)
    tl.store(address, tl.sum(tl.where(r <= x, turned, 0.0), 0))
    tl.store(address + BLOCK, tl.sum(tl.where(r > x, turned, 0.0), 0))
