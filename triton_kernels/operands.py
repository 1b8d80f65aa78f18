"""What kernels are given: addresses with their strides, the problem's sizes, and its bias.

A tuple that holds Rows ends with a constexpr, or Triton 3.6 forgets the numbers in them that are 1;
those of a plan, within a problem, have none that is 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from .. import problem as calls
from .configs import LARGEST_TILE
from .primitives import LOG2E

# Elements from row to row: those of a tile are counted in 32 bits.
ROW_LIMIT = 2**24


class Rows(NamedTuple):
    """A (batch, heads, sequence, channels) or (batch, heads, sequence) tensor.

    The last dimension is contiguous. Strides count elements; 0 broadcasts.
    """

    start: Tensor
    batch: int
    head: int
    row: int


class Factors(NamedTuple):
    """Rows of FACTORS numbers for keys before the queries and, `side` further, for keys after."""

    start: Tensor
    batch: int
    head: int
    row: int
    side: int = 0


class Plan(NamedTuple):
    """Which keys queries take, for a pass with a program a block of queries.

    keys (B, H, tiles, 2): of each tile of PLAN_TILE queries, the first key and the end; neither
    decreases from tile to tile. order (programs,): those with most to do first. int32
    """

    keys: Rows
    order: Tensor


class PlanOfKeys(NamedTuple):
    """The same, for a pass with a program a tile of keys.

    queries (B, H, tiles of keys, 4): from the first to before the second, some queries take keys of
    the tile; from the third to before the fourth, all take all.
    """

    keys: Rows
    order: Tensor
    queries: Rows


class Problem(NamedTuple):
    """What kernels are told of a `biased_flash_attn.problem.Problem`: sizes and mask.

    Query i stands at position i + n_key - n_query + shift and sees keys as `Geometry` says.

    sequences (B, 5) int64: of each, its first query, number of queries, first key, number of keys
    and shift, where these are not all rows of its batch entry. n_query and n_key are then those of
    the longest, until a kernel has taken its own (sequences.py); without them, shift is 0.
    """

    heads: int
    group: int  # query heads that share a key head
    n_query: int
    n_key: int
    window: int
    scale: float
    scale_in_base_2: float
    head_dim: tl.constexpr
    value_dim: tl.constexpr
    causal: tl.constexpr
    windowed: tl.constexpr
    positive_scale: tl.constexpr
    longest_query: int
    shift: int | tl.constexpr = tl.constexpr(0)
    plan: Plan | PlanOfKeys | None = None
    sequences: Tensor | None = None
    # Whether rows of a head, of the two tensors through which a kernel goes, are less than 2^31
    # elements apart, so that offsets take 32 bits; and equally far, so that both have the same.
    rows_near: tl.constexpr = tl.constexpr(False)
    rows_alike: tl.constexpr = tl.constexpr(False)


class Bias(NamedTuple):
    """A form as kernels compute it: see launch/forms.py.

    terms: slopes, the table in base 2, padded_table, or float64 sums; high and low: float32, and
    add up to these. squared: the bias is -log(1 + beta^2).
    factored: whole tiles take it from query_factors and key_factors, as bias/factors.py says; of a
    table, those from far (B or 1, H or 1, 2) on, whose numbers are places in it:
    bias/table_polynomials.py.
    ahead: their product is computed a tile before it is needed. sum_columns: how many of their
    columns sums of gradients take.
    """

    form: tl.constexpr
    squared: tl.constexpr
    factored: tl.constexpr
    terms: Rows | None
    gain: Rows | None
    high: Rows | None = None
    low: Rows | None = None
    query_factors: Factors | None = None
    key_factors: Factors | None = None
    far: Rows | None = None
    ahead: tl.constexpr = tl.constexpr(False)
    sum_columns: tl.constexpr = tl.constexpr(8)


def problem_of(
    problem: calls.Problem,
    plan: Plan | PlanOfKeys | None = None,
    *,
    rows_near: bool = False,
    rows_alike: bool = False,
) -> Problem:
    """What a kernel is told of a problem, of whose plan it takes its own view."""
    q, v, geometry, scale = problem.q, problem.v, problem.geometry, problem.scale
    reach = geometry.n_key + geometry.shift
    flags = q.shape[3], v.shape[3], geometry.causal, geometry.window is not None, scale > 0
    return Problem(
        q.shape[1],
        q.shape[1] // problem.k.shape[1],
        geometry.n_query,
        geometry.n_key,
        reach if geometry.window is None else min(geometry.window, reach),
        scale,
        scale * LOG2E.value,
        *map(tl.constexpr, flags),
        geometry.n_query,
        plan=plan,
        sequences=None if problem.sequences is None else problem.sequences.rows,
        rows_near=tl.constexpr(rows_near),
        rows_alike=tl.constexpr(rows_alike),
    )


def padded_table(table: Tensor) -> Tensor:
    """A table that may be read a tile beyond its end, as it is for queries beyond the last one."""
    padded = torch.nn.functional.pad(table.flatten(), (0, LARGEST_TILE))
    return padded[: table.numel()].view(table.shape)


def per_head(x: Tensor | None) -> Rows | None:
    """(B or 1, H or 1, ...) seen as if it had every batch entry and head."""
    if x is None:
        return None
    x = x if x.dim() < 3 or x.stride(-1) == 1 else x.contiguous()
    batch, head = (0 if x.shape[n] == 1 else x.stride(n) for n in (0, 1))
    return Rows(x, batch, head, x.stride(2) if x.dim() > 2 else 1)


def of_entries(x: Rows | None, entries: slice) -> Rows | None:
    """Of some batch entries; one that serves all stays."""
    return x if x is None or x.batch == 0 else x._replace(start=x.start[entries])


def rows(x: Tensor) -> Rows:
    """x (B, H, N, D), (B, H, N) or (B, H); one batch entry serves all."""
    if x.dim() == 4 and x.stride(2) >= ROW_LIMIT:
        x = x.contiguous()
    batch = 0 if x.shape[0] == 1 else x.stride(0)
    return Rows(x, batch, x.stride(1), x.stride(2) if x.dim() > 2 else 1)
