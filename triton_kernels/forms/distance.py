"""The form `distance`: a table over distances. attention/backward_table.py has its gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..bias.tile import table_values
from ..operands import FormFunctions, padded_table
from ..primitives import LOG2E, LOWEST, in_base_2, row_address
from .base import Kernels


@triton.jit
def tile_bias(head, queries, keys, pairs, sees, KEYS_FIRST: tl.constexpr):
    return table_values(head, pairs, sees, None)


@triton.jit
def page_bias(head, queries, keys, sees, REAL: tl.constexpr):
    table = row_address(head.bias.table, head.b, head.h, 0)[:, None]
    return in_base_2(tl.load(table + (queries.p[:, None] - keys.j[None, :]), sees, 0.0))


@triton.jit
def highest_bias(head, bounds, queries, tiles):
    table = row_address(bounds.table_highest, head.b, head.h[:, None], 0)
    highest = tl.maximum(tl.load(table + tiles.near_block), tl.load(table + tiles.far_block))
    return highest.to(tl.float64)


def _padded(table: Tensor) -> dict:
    largest = -LOWEST.value / 2  # so that its change of base is finite
    limited = torch.where(table.isinf(), table, table.clamp(-largest, largest))
    return {"table": padded_table(limited * LOG2E.value)}


DISTANCE = Kernels(
    ("table",),
    FormFunctions(tile_bias=tile_bias, page_bias=page_bias, highest_bias=highest_bias),
    lambda gathered: [gathered.table()],
    _padded,
    may_be_factored=lambda block_m, table: table.shape[2] >= 2 * block_m,
)
