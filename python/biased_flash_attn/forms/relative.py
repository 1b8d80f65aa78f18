"""Biases that are products of a vector per query, or per key, and a vector per distance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import sequences
from ..geometry import Geometry
from ..shared_constants import ROUNDING, rounding_of_logits
from ..tracing import values_of
from .base import Layout, register
from .chunk_pairs import Pair
from .distance import block_maxima
from .gradients import IN_K, IN_Q, OWN
from .other_tokens import DecodableForm, DistributableForm
from .skippable import SkippableForm, StateBounds
from .tail_mass import KeySide

MAX_RANK = 128
BEYOND = ("zero", "last")
_HALF = (torch.bfloat16, torch.float16)
_CHUNK = 2**16  # elements that are converted to float64 at a time


@dataclass(frozen=True, eq=False, repr=False)
class Relative(SkippableForm, DecodableForm, DistributableForm):
    """b_ij = sum_r U[i, r] P[r, d] + sum_r W[j, r] Q[r, d], where d = p_i - j.

    query_factors U (B or 1, H or 1, query_rows, R) and key_factors W (B or 1, H or 1, key_rows, R')
    have their own ranks R and R', from 0 to MAX_RANK. A term that is absent has rank 0, so that
    there are always four tensors, and sums over r need no exception for it.

    query_tables P (1, H or 1, R, n) and key_tables Q (1, H or 1, R', n) have one column for each of
    n distances. Where attention is causal, the first column is that of distance 0. Otherwise column
    n // 2 is that of distance 0, and those before it are of negative distances. The geometry and
    the shapes thus determine which distances a table has. At distances outside it the bias is 0 or
    that of the nearest column, if beyond is "zero" or "last"; the name of the form states which.

    The rows of factors, if any, are contiguous. All tensors have one dtype: float64 for float64
    inputs, else float32, bfloat16 or float16. In half precision, products of factors and table
    values are exact in float32.
    """

    query_factors: Tensor
    query_tables: Tensor
    key_factors: Tensor
    key_tables: Tensor
    beyond: str = "zero"

    tensor_names = ("query factors", "query tables", "key factors", "key tables")
    per_row = True
    per_pair = True

    def __post_init__(self):
        for name, factors, table in (
            ("query_tables", self.query_factors, self.query_tables),
            ("key_tables", self.key_factors, self.key_tables),
        ):
            if table.dim() != 4 or len(table) != 1 or table.shape[3] == 0:
                raise ValueError(
                    f"{name} has shape {tuple(table.shape)}; it must be (1, H or 1, R, n), n > 0"
                )
            if factors.shape[-1] > MAX_RANK:
                raise ValueError(f"rank is {factors.shape[-1]}; it must be at most {MAX_RANK}")
            if factors.shape[-1] > 1 and factors.stride(-1) != 1 and factors.numel() > 0:
                side = name.removesuffix("_tables")
                raise ValueError(f"the last dimension of {side}_factors must be contiguous")

    @property
    def name(self) -> str:
        return "relative" if self.beyond == "zero" else "relative_last"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.query_factors, self.query_tables, self.key_factors, self.key_tables

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        return self.query_tables, self.key_tables

    def with_tables(self, tables: Sequence[Tensor]) -> Relative:
        query_tables, key_tables = tables
        return replace(self, query_tables=query_tables, key_tables=key_tables)

    @property
    def n_columns(self) -> int:
        return self.query_tables.shape[-1]

    def layouts(self, geometry: Geometry, real: torch.dtype) -> list[Layout]:
        own = self.query_factors.dtype
        dtype = own if own in _HALF and real == torch.float32 else real
        rows = geometry.query_rows, geometry.key_rows
        ranks = self.query_factors.shape[-1], self.key_factors.shape[-1]
        return [
            Layout(self.query_factors, dtype, (rows[0], ranks[0])),
            Layout(self.query_tables, dtype, (ranks[0], self.n_columns)),
            Layout(self.key_factors, dtype, (rows[1], ranks[1])),
            Layout(self.key_tables, dtype, (ranks[1], self.n_columns)),
        ]

    def dense(self, geometry: Geometry) -> Tensor:
        """The bias of every visible pair, and 0 for others, (B or 1, H or 1, n_query, n_key)
        float64. Gradients sum over visible pairs only."""
        device = self.query_factors.device
        column = geometry.pair_distances(device) - self._first(geometry)
        exists, nearest = geometry.visible(device), column.clamp(0, self.n_columns - 1)
        if self.beyond == "zero":
            exists = exists & (column == nearest)
        query_term = _at_pairs(*self._terms()[0], nearest, exists)
        # In decoding, the rows of absent factors are those of new keys.
        if self.key_factors.shape[-1] == 0:
            return query_term
        return query_term + _at_pairs(*self._terms()[1], nearest.mT, exists.mT).mT

    def accumulators(self, batch: int, sequences: int, heads: int) -> list[Tensor]:
        made, entries = [], (batch, sequences, batch, sequences)
        for x, n in zip(self.tensors, entries, strict=True):
            is_sum = x.shape[:2] != (n, heads)
            dtype = torch.promote_types(x.dtype, torch.float32) if is_sum else x.dtype
            made.append(x.new_zeros(n, heads, *x.shape[2:], dtype=dtype))
        return made

    def gradient_targets(self, q: Tensor, k: Tensor) -> list[int]:
        """Factors may be q or k themselves. The same memory is not enough: a view has a gradient
        of its own. So has a key that several query heads read, for each of these heads."""
        queries = IN_Q if self.query_factors is q else OWN
        is_k = self.key_factors is k and k.shape[1] == q.shape[1]
        return [queries, OWN, IN_K if is_k else OWN, OWN]

    def for_sequence(self, rows: sequences.Sequence, whole: Geometry, own: Geometry) -> Relative:
        factors = {
            "query_factors": rows.queries(self.query_factors),
            "key_factors": rows.keys(self.key_factors),
        }
        return replace(self, **factors).within(whole, own)

    def within(self, whole: Geometry, own: Geometry) -> Relative:
        if whole.causal or not own.causal:
            return self
        return self._with_columns(self.n_columns // 2, (self.n_columns + 1) // 2)

    def for_queries(self, queries: slice) -> Relative:
        return replace(self, query_factors=self.query_factors[:, :, queries])

    def for_keys(self, keys: slice) -> Relative:
        return replace(self, key_factors=self.key_factors[:, :, keys])

    @property
    def state(self) -> Tensor | None:
        return self.key_factors if self.key_factors.shape[-1] else None

    def with_state(self, state: Tensor) -> Relative:
        return replace(self, key_factors=state)

    def for_tokens(self, tokens: slice, queries: slice) -> Relative:
        return self.for_queries(queries).for_keys(tokens)

    def for_pair(self, pair: Pair, states: None) -> Relative:
        form = self.for_keys(slice(pair.key_chunk * pair.n, (pair.key_chunk + 1) * pair.n))
        if pair.is_own:
            return form
        begin = pair.distance_offset - self._first(pair.whole)
        count = min(pair.geometry.n_distances, max(1, self.n_columns - begin))
        return form._with_columns(begin, count)

    def extremes(self, block: int) -> tuple[Tensor, Tensor]:
        """The largest norms of Q, and those of P, over blocks of `block` distances from 0 on."""
        real = torch.promote_types(self.query_tables.dtype, torch.float32)
        norms = (_norms(x.mT) * (1 + 2**-16) for x in (self.key_tables, self.query_tables))
        q, p = (block_maxima(x.nan_to_num(torch.inf, torch.inf), block).to(real) for x in norms)
        return q, p

    def decays(self, geometry: Geometry, log_tolerance: float) -> bool:
        """Whether the bound of some head's bias falls by more than the tolerance up to the farthest
        quarter of the distances."""
        if 0 in (geometry.query_rows, geometry.key_rows):
            return False
        reach = geometry.n_distances + geometry.first_distance
        far = min(max(0, 3 * reach // 4 - self._first(geometry)), self.n_columns)
        falls = 0.0
        for factors, table in self._terms():
            norms = self._column_norms(table)
            fall = norms.amax(-1) - norms[..., far:].amax(-1)
            falls = falls + _norms(factors).amax(-1) * fall
        return bool((falls > -log_tolerance).any())

    def mass(self, side: KeySide, geometry: Geometry) -> RelativeMass:
        first = self._first(geometry)
        return RelativeMass(side, self, 1 - first - self.n_columns if side.is_mirrored else first)

    def mass_for_pair(self, pair: Pair, side: KeySide, bounds: StateBounds | None) -> RelativeMass:
        return RelativeMass(side, self.for_pair(pair, None), int(not pair.is_past))

    def roundings(self, dtype: torch.dtype) -> Tensor:
        per_query, per_key = (_roundings(*term, dtype) for term in self._terms())
        return per_query + per_key.amax(-1, keepdim=True)

    def _terms(self) -> tuple[tuple[Tensor, Tensor], ...]:
        return (
            (self.query_factors, self.query_tables),
            (self.key_factors, self.key_tables),
        )

    def _first(self, geometry: Geometry) -> int:
        """The distance of the first column."""
        return 0 if geometry.causal else -(self.n_columns // 2)

    def _with_columns(self, begin: int, count: int) -> Relative:
        return self.with_tables([columns(x, begin, count, self.beyond) for x in self.tables])

    def _column_norms(self, table: Tensor, mirrored: bool = False) -> Tensor:
        """The norm of each column, and of those outside the table; (1, H or 1, n + 1) float64, with
        NaN as infinity."""
        norms = _norms(table.mT).nan_to_num(torch.inf, torch.inf)
        norms = norms.flip(-1) if mirrored else norms
        outside = norms[..., -1:] if self.beyond == "last" else torch.zeros_like(norms[..., -1:])
        return torch.cat([norms, outside], -1)


class RelativeMass:
    """The bound in which every key before a cut has the largest bias that any of them can have: the
    norm of the query's factors times the largest norm of a column, and the same for the keys."""

    def __init__(self, side: KeySide, form: Relative, first: int):
        self.side, self.first, mirrored = side, first, side.is_mirrored
        self.query_norms, norms = _norms(form.query_factors), _norms(form.key_factors)
        self.key_norms = side.prefix_max(norms.flip(-1) if mirrored else norms).clamp(min=0)
        # The largest norm from each column on.
        self.columns = [
            form._column_norms(x, mirrored).flip(-1).cummax(-1).values.flip(-1) for x in form.tables
        ]

    def log_mass(self, rows: slice, tile: Tensor) -> Tensor:
        cut = self.side.cut(tile)
        distance = self.side.positions[rows] - cut + 1
        column = (distance - self.first).clamp(0, self.columns[0].shape[-1] - 1)
        p, q = (x.expand(*tile.shape[:2], -1).gather(-1, column) for x in self.columns)
        key_norms = self.key_norms.expand(*tile.shape[:2], -1).gather(-1, tile)
        return torch.log(cut.double()) + self.query_norms[..., rows] * p + key_norms * q


def _at_pairs(factors: Tensor, table: Tensor, column: Tensor, exists: Tensor) -> Tensor:
    """The products of factors and the columns of a table for pairs of a row and another one, or 0
    if `exists` (rows, other rows) is false; (B or 1, H or 1, rows, other rows) float64."""
    factors, table = factors.double(), table.double()
    if values_of(factors).isfinite().all() and values_of(table).isfinite().all():
        products = factors @ table
        pairs = products.gather(-1, column.expand(*products.shape[:2], -1, -1))
        return torch.where(exists, pairs, 0)
    # The gradients of a matrix product would include 0 * NaN of other pairs.
    vectors = table.mT[:, :, column].where(exists[..., None], 0)
    return torch.where(exists, (factors[..., None, :] * vectors).sum(-1), 0)


def columns(table: Tensor, begin: int, count: int, beyond: str) -> Tensor:
    """The columns begin, ..., begin + count - 1 of a table (..., n); those outside it are 0 or the
    nearest one, if beyond is "zero" or "last"."""
    before = min(max(0, -begin), count)
    after = min(max(0, begin + count - table.shape[-1]), count)
    inside = table[..., max(0, begin) : max(0, begin + count)]
    if not before and not after:
        return inside
    if beyond == "zero":
        return pad(inside, (before, after))
    first, last = table[..., :1], table[..., -1:]
    ends = first.expand(*first.shape[:-1], before), last.expand(*last.shape[:-1], after)
    return torch.cat([ends[0], inside, ends[1]], -1)


def _roundings(factors: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """A bound on the errors of the products of each factor and any column of the table, in units of
    2^-23: those of sums in float32 and, twice, those of kernels that convert both to dtype. Such an
    error changes the logits of skipped keys, and the sum that these are compared with."""
    sizes = [_norms(factors), _norms(table.mT).amax(-1, keepdim=True)]
    in_sums = rounding_of_logits(factors.shape[-1]) / ROUNDING * sizes[0] * sizes[1]
    if dtype not in _HALF or factors.dtype == table.dtype == dtype:
        return in_sums
    lost = [_norms(factors, dtype), _norms(table.mT, dtype).amax(-1, keepdim=True)]
    return in_sums + 2 / ROUNDING * (lost[0] * sizes[1] + (sizes[0] + lost[0]) * lost[1])


def _norms(vectors: Tensor, lost_in: torch.dtype | None = None) -> Tensor:
    """The norms of vectors (..., rows, R) or, with `lost_in`, of what they lose by conversion to
    this dtype. float64, by few rows at a time to save memory.

    They are written to one tensor: small results between the temporary copies of chunks would keep
    malloc from using the memory of a copy for the next one.
    """
    vectors = vectors.detach()
    norms = vectors.new_empty(vectors.shape[:-1], dtype=torch.float64)
    per_row = max(1, vectors.numel() // max(1, vectors.shape[-2]))
    rows = max(1, _CHUNK // per_row)
    for x, out in zip(vectors.split(rows, -2), norms.split(rows, -1), strict=True):
        exact = x.double()
        if lost_in is not None:
            exact = exact - x.to(lost_in).double()
        # torch.linalg.vector_norm is eight times slower for transposed tables.
        out.copy_(exact.square().sum(-1)).sqrt_()
    return norms


def _rebuilt(beyond: str, tensors: Sequence[Tensor]) -> Relative:
    return Relative(*tensors, beyond=beyond)


register("relative", partial(_rebuilt, "zero"))
register("relative_last", partial(_rebuilt, "last"))
