"""The operands of the kernels: addresses with strides, the sizes of the problem, and its bias.

A tuple that contains tuples with integers must end with a constexpr, because Triton 3.6 otherwise
loses integers in them that equal 1: it updates the type of a tuple only when it sets one of its own
compile-time values. The tensors of a plan, inside a problem, have no stride of 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from .. import problem as calls
from .configs import LARGEST_TILE
from .primitives import LOG2E

# The limit of a row stride in elements, so that offsets within a tile fit in 32 bits.
ROW_LIMIT = 2**24


class Strided(NamedTuple):
    """A (batch, heads, sequence, channels) or (batch, heads, sequence) tensor with its strides.

    The last dimension is contiguous. Strides count elements; 0 broadcasts.
    """

    start: Tensor
    batch: int
    head: int
    row: int


class Factors(NamedTuple):
    """Rows of FACTORS numbers for keys before the queries. Those for keys after the queries are
    `side` elements further on."""

    start: Tensor
    batch: int
    head: int
    row: int
    side: int = 0


class Plan(NamedTuple):
    """The plan, for a kernel with one program per block of queries. int32

    keys (B, H, tiles, 2): the key range [first, end) of each tile of PLAN_TILE queries; neither
    bound decreases from tile to tile. order (programs,): program numbers by decreasing work.
    """

    keys: Strided
    order: Tensor


class PlanOfKeys(NamedTuple):
    """The plan, for a kernel with one program per tile of keys.

    queries (B, H, tiles of keys, 4): numbers [0] and [1] are the range of queries that attend to at
    least one key of the tile; [2] and [3] the range of queries that attend to all of them.
    """

    keys: Strided
    order: Tensor
    queries: Strided


class Problem(NamedTuple):
    """The sizes and the mask of a `biased_flash_attn.problem.Problem`.

    Query i has position i + n_key - n_query + shift; `Geometry` defines the visible keys.

    sequences (B, 5) int64: the first query, number of queries, first key, number of keys and shift
    of each sequence, or None if every batch entry is one whole sequence; shift is then 0. With
    sequences, n_query and n_key are maxima, until a kernel replaces them by those of its sequence
    (sequences.py).
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
    # Of the two tensors over whose rows a kernel iterates: whether offsets within a head fit in 32
    # bits, and whether their row strides are equal, so that they can share these offsets.
    narrow_offsets: tl.constexpr = tl.constexpr(False)
    same_row_stride: tl.constexpr = tl.constexpr(False)


class Function(NamedTuple):
    """A piecewise linear function: see bias/segments.py.

    segments: the smallest power of two that exceeds knot_count.
    """

    knots: Strided
    slopes: Strided
    intercepts: Strided
    knot_count: int
    segments: tl.constexpr


class VectorTables(NamedTuple):
    """The tables of a relative bias: a row for each of `columns` distances.

    queries, keys: the vectors that those of the queries and of the keys are multiplied by, with
    query_rank and key_rank numbers each: none for a term that is absent. last: beyond a table, its
    nearest row is used; otherwise the bias is 0 there.
    """

    queries: Strided
    keys: Strided
    columns: int
    query_rank: tl.constexpr
    key_rank: tl.constexpr
    last: tl.constexpr


class FormFunctions(NamedTuple):
    """The device functions of a form, or None where it has no bias, bound or gradients.

    They are passed with the operands, so that Triton's keys of compiled kernels include their
    source. A field of a constexpr would be represented by its name alone.

    tile_bias(head, queries, keys, pairs, sees, KEYS_FIRST): the bias of a tile in base 2,
        [BLOCK_M, BLOCK_N], or its transpose with KEYS_FIRST; arbitrary where sees is False.
    page_bias(head, queries, keys, sees, REAL): the same in base 2 for keys of a page; products are
        summed in REAL, float32 or float64.
    highest_bias(head, bounds, queries, tiles): an upper bound on the bias of tiles of keys, from
        their Bounds, in natural logarithms, [BLOCK_M, BLOCK_N]; float64, as large terms of opposite
        sign cancel.
    no_query_gradients(head, BLOCK_M): the QueryGradients of a block, 0; by default, [BLOCK_M] each.
    add_query_gradients(head, queries, keys, tile, gradients, grad_pairs, IN_TWO): adds the
        PairGradients of a tile, [BLOCK_M, BLOCK_N].
    store_query_gradients(head, first, queries, gradients, grad_gain, grad_others)
    no_key_gradients(head, BLOCK_N): the gradients of a block of keys, 0; by default, [BLOCK_N].
    add_key_gradients(head, queries, keys, grad_s, gradients, IN_TWO): adds those of a tile,
        [BLOCK_N, BLOCK_M].
    store_key_gradients(head, first, gradients, grad_keys)
    grad_beta(head, pairs, difference, grad_s, IN_TWO): the gradient of beta (forms/beta.py).
    """

    tile_bias: JITFunction | None = None
    page_bias: JITFunction | None = None
    highest_bias: JITFunction | None = None
    no_query_gradients: JITFunction | None = None
    add_query_gradients: JITFunction | None = None
    store_query_gradients: JITFunction | None = None
    no_key_gradients: JITFunction | None = None
    add_key_gradients: JITFunction | None = None
    store_key_gradients: JITFunction | None = None
    grad_beta: JITFunction | None = None


class Bias(NamedTuple):
    """The device functions and the operands of a form: see forms/.

    slopes: one per head. sums: float64 prefix sums; high, low: two float32 numbers whose sum is the
    prefix sum. table: values by distance, padded by padded_table and, without `function`, in base
    2; in decoding, they are neither, and a relative bias has a table per query. function: maps the
    product of a gain and an entry of the table to the bias. dense: the bias of every pair.
    query_vectors, key_vectors, vector_tables: those of a relative bias (bias/relative.py).
    factored: unmasked tiles use query_factors and key_factors (bias/factors.py) or, beyond the band
    of a relative bias, have none. only_far: they do so only far from the queries: beyond that band
    or, with a table, at or beyond the two table indices in far (B or 1, H or 1, 2):
    bias/table_polynomials.py.
    ahead: the product of the factors is computed one tile ahead.
    sum_columns: the number of columns of factors that gradients of sums use.
    """

    form: FormFunctions
    factored: tl.constexpr = tl.constexpr(False)
    slopes: Strided | None = None
    sums: Strided | None = None
    table: Strided | None = None
    dense: Strided | None = None
    gain: Strided | None = None
    high: Strided | None = None
    low: Strided | None = None
    function: Function | None = None
    query_vectors: Strided | None = None
    key_vectors: Strided | None = None
    vector_tables: VectorTables | None = None
    query_factors: Factors | None = None
    key_factors: Factors | None = None
    far: Strided | None = None
    only_far: tl.constexpr = tl.constexpr(False)
    ahead: tl.constexpr = tl.constexpr(False)
    sum_columns: tl.constexpr = tl.constexpr(8)


class Bounds(NamedTuple):
    """Bounds per tile of the keys of a cache: a `biased_flash_attn.problem.TileBounds`, in which a
    form may replace those of its tables by others (forms/)."""

    centres: Strided
    extents: Strided
    lowest: Strided | None
    highest: Strided | None
    table_lowest: Strided | None
    table_highest: Strided | None
    end: tl.constexpr = tl.constexpr(None)  # see the top of this file


class Head(NamedTuple):
    """One head of one sequence: the operands, and the numbers of batch entry and head.

    It must be passed as an argument directly, as its fields must (sequences.py).
    """

    bias: Bias
    problem: Problem
    b: int
    h: int
    end: tl.constexpr = tl.constexpr(None)  # see the top of this file


def problem_of(
    problem: calls.Problem,
    plan: Plan | PlanOfKeys | None = None,
    *,
    narrow_offsets: bool = False,
    same_row_stride: bool = False,
) -> Problem:
    """Returns the kernel's view of a problem. plan: the problem's plan in the layout of the
    kernel."""
    q, v, geometry, scale = problem.q, problem.v, problem.geometry, problem.scale
    longest_window = geometry.n_key + geometry.shift
    flags = q.shape[3], v.shape[3], geometry.causal, geometry.window is not None, scale > 0
    return Problem(
        q.shape[1],
        q.shape[1] // problem.k.shape[1],
        geometry.n_query,
        geometry.n_key,
        longest_window if geometry.window is None else min(geometry.window, longest_window),
        scale,
        scale * LOG2E.value,
        *map(tl.constexpr, flags),
        geometry.n_query,
        plan=plan,
        sequences=None if problem.sequences is None else problem.sequences.rows,
        narrow_offsets=tl.constexpr(narrow_offsets),
        same_row_stride=tl.constexpr(same_row_stride),
    )


def padded_table(table: Tensor) -> Tensor:
    """Returns a table padded by a tile, because queries beyond the last one read beyond its end."""
    padded = torch.nn.functional.pad(table.flatten(), (0, LARGEST_TILE))
    return padded[: table.numel()].view(table.shape)


def per_head(x: Tensor | None) -> Strided | None:
    """Returns a tensor (B or 1, H or 1, ...) with its strides, broadcast over batch and heads."""
    if x is None:
        return None
    x = x if x.dim() < 3 or x.stride(-1) == 1 else x.contiguous()
    batch, head = (0 if x.shape[n] == 1 else x.stride(n) for n in (0, 1))
    return Strided(x, batch, head, x.stride(2) if x.dim() > 2 else 1)


def for_entries(x: Strided | None, entries: slice) -> Strided | None:
    """Selects batch entries, unless x broadcasts over the batch."""
    return x if x is None or x.batch == 0 else x._replace(start=x.start[entries])


def strided(x: Tensor) -> Strided:
    """Returns x (B, H, N, D), (B, H, N) or (B, H) with its strides, broadcast over the batch if B
    is 1."""
    if x.dim() == 4 and x.stride(2) >= ROW_LIMIT:
        x = x.contiguous()
    batch = 0 if x.shape[0] == 1 else x.stride(0)
    return Strided(x, batch, x.stride(1), x.stride(2) if x.dim() > 2 else 1)
