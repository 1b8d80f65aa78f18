"""The form `dense`: the bias of every pair is given."""

from __future__ import annotations

import triton
import triton.language as tl

from ..bias.tile import pair_address, pairs_of
from ..decode.pages import query_at
from ..operands import FormFunctions
from ..primitives import in_base_2, row_address
from .base import Kernels


@triton.jit
def tile_bias(head, queries, keys, pairs, sees, KEYS_FIRST: tl.constexpr):
    address, exists = pair_address(head.bias.dense, head, pairs)
    return in_base_2(tl.load(address, exists & sees, other=0.0).to(tl.float32))


@triton.jit
def page_bias(head, queries, keys, sees, REAL: tl.constexpr):
    i = query_at(head.problem, head.b, queries.p[:, None])
    address = row_address(head.bias.dense, head.b, head.h, 0)[:, None]
    address += tl.cast(i, tl.int64) * head.bias.dense.row + keys.j[None, :]
    return in_base_2(tl.load(address, sees, 0.0).to(tl.float32))


@triton.jit
def store_pairs(head, queries, keys, tile, gradients, grad_pairs, IN_TWO: tl.constexpr):
    """Stores dS, which is the gradient of the bias."""
    address, exists = pair_address(grad_pairs, head, pairs_of(head, queries, keys, False))
    tl.store(address, tile.grad_s, exists)
    return gradients


DENSE = Kernels(
    ("dense",),
    FormFunctions(tile_bias=tile_bias, page_bias=page_bias, add_query_gradients=store_pairs),
    lambda gathered: [gathered.grad_gain],
    gradient_shapes=lambda bias, problem, blocks: {
        "grad_gain": (*problem.q.shape[:3], problem.k.shape[2])
    },
    trains_queries=True,
    stores_pairs=True,
)
