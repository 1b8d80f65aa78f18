"""Biases that are products of a vector per query, or per key, and a vector per distance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..forms import Geometry, Relative
from ..forms.relative import BEYOND, MAX_RANK, columns
from ..summary import ShownByShapes
from .base import check_given
from .cumulative import described
from .parameters import positive_int, read_by
from .tabulated import Tabulated

Table = Tensor | Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class RelativeBias(ShownByShapes, Tabulated):
    """b_ij = sum_r U[i, r] P[r, d] + sum_r W[j, r] Q[r, d], where d = p_i - j.

    U holds a vector per query and W one per key; P and Q hold a vector per distance. Either term
    may be absent. Its vectors have 1 to 128 entries, the rank R of the term. The largest number of
    heads of any of these tensors is that of the bias; a bias of one head is that of all heads of q.

    Factors and tables keep their dtype if all of them have the same, and are converted to float32
    or, for float64 queries, float64 otherwise.

    Args:
        query_factors: U, (B or 1, H or 1, queries, R); for packed sequences (1, H or 1, total, R).
        query_tables: P, (H or 1, R, n), for the n distances from `first` on; or a function that
            maps any distances (n,) in float64, ascending, to such a table. Decoding keeps its
            values, as long as equal functions are given and what they read does not change.
        key_factors: W, (B or 1, H or 1, keys, R). In decoding it has the rows of the new keys, and
            for `context_parallel_attention` those of all keys of the sequence.
        key_tables: Q, for the same distances as P.
        first: the distance of the first column of the tables, negative for keys after the query.
        end: if the tables are functions, the distance after the last one at which they are
            evaluated, from `first` on; None for all distances that occur.
        beyond: the bias at distances outside the tables: "zero" for 0, "last" for that of the
            nearest distance of the tables.

    Raises TypeError or ValueError for invalid arguments.
    """

    query_factors: Tensor | None = None
    query_tables: Table | None = None
    key_factors: Tensor | None = None
    key_tables: Table | None = None
    first: int = 0
    end: int | None = None
    beyond: str = "zero"

    # Whether it depends on more than positions, for pictures: it differs from query to query.
    depends_on_content: ClassVar[bool] = True

    def __post_init__(self):
        for side in ("query", "key"):
            _check_term(side, getattr(self, f"{side}_factors"), getattr(self, f"{side}_tables"))
        if self.query_factors is None and self.key_factors is None:
            raise ValueError("query_factors and key_factors are None; one of them must be given")
        tables = [x for x in self._tables() if isinstance(x, Tensor)]
        if len(tables) == 1 < len(self._tables()):
            raise TypeError(
                "one of query_tables and key_tables is a function; both must be, or both tensors"
            )
        if len({x.shape[-1] for x in tables}) > 1:
            raise ValueError(
                f"query_tables has {tables[0].shape[-1]} distances and key_tables has"
                f" {tables[1].shape[-1]}; they must have the same"
            )
        heads = {x.shape[1] for x in self._factors()}
        heads |= {len(x) for x in tables}
        if len(heads - {1}) > 1:
            raise ValueError(
                f"the factors and tables have {sorted(heads)} heads; each must have H or 1"
            )
        if not isinstance(self.first, int) or isinstance(self.first, bool):
            raise TypeError(f"first is {self.first!r}; it must be an int")
        if self.end is not None:
            _check_end(self.end, self.first, bool(tables))
        if self.beyond not in BEYOND:
            raise ValueError(f"beyond is {self.beyond!r}; it must be one of {BEYOND}")

    @property
    def num_heads(self) -> int:
        tables = (x for x in self._tables() if isinstance(x, Tensor))
        return max([x.shape[1] for x in self._factors()] + [len(x) for x in tables])

    def lower(
        self, geometry: Geometry, dtype: torch.dtype, device: torch.device | str | None
    ) -> Relative:
        """The factors and the tables from distance 0 on or, unless causal, symmetric around it."""
        first, end = self._known(geometry)
        begin, stop = _range(first, end, geometry.causal)
        tables = self._tables()
        if self._has_functions:
            first = min(max(first, begin), end - 1)
            device = self._factors()[0].device
            tables = self._evaluated(torch.arange(first, end, dtype=torch.float64, device=device))
        # Converted first, so that gradients are summed over the added columns in the wider dtype.
        real = self._dtype(tables, dtype)
        tables = [x[None].to(real) for x in tables]
        tables = [columns(x, begin - first, stop - begin, self.beyond) for x in tables]
        return self._form(self._of_both_terms(tables), geometry, dtype)

    def for_heads(self, heads: slice) -> RelativeBias:
        def selected(x: Tensor | None) -> Tensor | None:
            return x if x is None or x.shape[1] == 1 else x[:, heads]

        def selected_tables(table):
            if table is None:
                return None
            if not isinstance(table, Tensor):
                return lambda d: selected_tables(table(d))
            return table if len(table) == 1 else table[heads]

        return replace(
            self,
            query_factors=selected(self.query_factors),
            query_tables=selected_tables(self.query_tables),
            key_factors=selected(self.key_factors),
            key_tables=selected_tables(self.key_tables),
        )

    def table_sources(self) -> tuple:
        read = [x for table in self._tables() if callable(table) for x in read_by(table)]
        terms = self.query_tables, self.key_tables
        return *terms, self.first, self.end, self.beyond, self.num_heads, *read

    def table_length(self, geometry: Geometry) -> int:
        return _range(*self._known(geometry), causal=True)[1]

    def tables(self, d: Tensor) -> tuple[Tensor, ...]:
        return self._of_both_terms([x[None] for x in self._evaluated(d)])

    def over(self, form: Relative, geometry: Geometry, dtype: torch.dtype) -> Relative:
        return self._form(form.tables, geometry, dtype)

    def dense(self, n_query: int, n_key: int) -> Tensor:
        """The bias of every pair, (B or 1, H or 1, n_query, n_key) float64, unmasked."""
        geometry = Geometry(n_query, n_key, causal=False)
        return self.lower(geometry, torch.float64, self._factors()[0].device).dense(geometry)

    def _known(self, geometry: Geometry) -> tuple[int, int]:
        """The range of the distances of the given tables."""
        if not self._has_functions:
            return self.first, self.first + self._tables()[0].shape[-1]
        if self.end is not None:
            return self.first, self.end
        first = geometry.first_distance
        return _range(first, first + geometry.n_distances, geometry.causal)

    def _evaluated(self, d: Tensor) -> list[Tensor]:
        """The tables of the functions at distances d (n,) in float64."""
        return [
            self._checked(function(d), factors.shape[-1], d.shape[0])
            for function, factors in zip(self._tables(), self._factors(), strict=True)
        ]

    def _checked(self, table: Tensor, rank: int, n: int) -> Tensor:
        is_table = isinstance(table, Tensor) and table.shape[1:] == (rank, n)
        if not is_table or (len(table) != 1 and len(table) != self.num_heads):
            got = tuple(table.shape) if isinstance(table, Tensor) else type(table).__name__
            shapes = [(h, rank, n) for h in dict.fromkeys((self.num_heads, 1))]
            raise ValueError(
                f"the function of distances returned {got} for {n} distances; it must return"
                f" a tensor of shape {' or '.join(map(str, shapes))}"
            )
        return table

    def _of_both_terms(self, tables: list[Tensor]) -> tuple[Tensor, ...]:
        """The tables of both terms, that of an absent one with rank 0."""
        absent = tables[0].new_zeros(1, 1, 0, tables[0].shape[-1])
        given = iter(tables)
        factors = self.query_factors, self.key_factors
        return tuple(absent if x is None else next(given) for x in factors)

    def _form(self, tables: tuple[Tensor, ...], geometry: Geometry, dtype: torch.dtype) -> Relative:
        given = self._factors()[0]
        u, w = (
            given.new_zeros(1, 1, rows, 0) if x is None else _with_contiguous_rows(x)
            for x, rows in (
                (self.query_factors, geometry.query_rows),
                (self.key_factors, geometry.key_rows),
            )
        )
        real = self._dtype(tables, dtype)
        tensors = (x.to(real) for x in (u, tables[0], w, tables[1]))
        return Relative(*tensors, beyond=self.beyond)

    def _dtype(self, tables: Sequence[Tensor], dtype: torch.dtype) -> torch.dtype:
        """The one of all factors and tables or, if they differ or one is float64, dtype."""
        own, *others = {x.dtype for x in (*self._factors(), *tables)}
        return dtype if others or torch.float64 in (dtype, own) else own

    @property
    def _has_functions(self) -> bool:
        return not isinstance(self._tables()[0], Tensor)

    def _factors(self) -> list[Tensor]:
        return [x for x in (self.query_factors, self.key_factors) if x is not None]

    def _tables(self) -> list[Table]:
        return [x for x in (self.query_tables, self.key_tables) if x is not None]


def _range(first: int, end: int, causal: bool) -> tuple[int, int]:
    """The distances of the columns of the form's tables, given those that are known."""
    if causal:
        return 0, max(1, end)
    half = max(-first, end - 1, 0)
    return -half, half + 1


def _with_contiguous_rows(factors: Tensor) -> Tensor:
    is_contiguous = factors.shape[-1] <= 1 or factors.stride(-1) == 1
    return factors if is_contiguous else factors.contiguous()


def _check_end(end: int, first: int, has_tensors: bool) -> None:
    if not isinstance(end, int) or isinstance(end, bool):
        raise TypeError(f"end is {end!r}; it must be None or an int")
    if has_tensors:
        raise ValueError(f"end is {end}, but the tables are tensors; it must be None")
    if end <= first:
        raise ValueError(f"end is {end}; it must be more than first, {first}")


def _check_term(side: str, factors: Tensor | None, table: Table | None) -> None:
    if (factors is None) != (table is None):
        given, missing = ("factors", "tables") if table is None else ("tables", "factors")
        raise ValueError(f"{side}_{given} is given and {side}_{missing} is None; pass both")
    if factors is None:
        return
    check_tensor(f"{side}_factors", factors, 4, "(B or 1, H or 1, N, R)")
    rank = factors.shape[-1]
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"{side}_factors has rank {rank}; it must be from 1 to {MAX_RANK}")
    if callable(table) and not isinstance(table, Tensor):
        return
    check_tensor(f"{side}_tables", table, 3, "(H or 1, R, n)")
    if table.shape[1] != rank or table.shape[2] == 0:
        raise ValueError(
            f"{side}_tables has shape {tuple(table.shape)}; it must be (H or 1, {rank}, n), n > 0"
        )


def rank_of(name: str, value: int) -> int:
    """Returns value if it can be the rank of a term, or raises an error that names the argument."""
    if positive_int(name, value) > MAX_RANK:
        raise ValueError(f"{name} is {value}; it must be at most {MAX_RANK}")
    return value


def nonnegative_int(name: str, value: int) -> int:
    """Returns value, or raises an error that names the argument."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if value < 0:
        raise ValueError(f"{name} must be 0 or more, not {value}")
    return value


def check_tensor(name: str, x: Tensor, dim: int, shape: str) -> None:
    """Validates the type and the number of dimensions of an argument."""
    check_given(name, x)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} must be a floating point tensor, not {described(x)}")
    if x.dim() != dim:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {shape}")


def check_heads(name: str, x: Tensor, num_heads: int, head_dim: int) -> None:
    """Validates that x is (B, num_heads, N, head_dim)."""
    shape = f"(B, {num_heads}, N, {head_dim})"
    check_tensor(name, x, 4, shape)
    if x.shape[1] != num_heads or x.shape[3] != head_dim:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {shape}")


def states_of_queries(x: Tensor | None, q: Tensor | None, dim: int) -> Tensor:
    """The hidden states x (B, N, dim) of the last Nq tokens, or of all of them without q."""
    check_tensor("x", x, 3, f"(B, N, {dim})")
    if x.shape[-1] != dim:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be (B, N, {dim})")
    if q is None:
        return x
    check_tensor("q", q, 4, "(B, H, Nq, D)")
    if q.shape[2] > x.shape[1]:
        raise ValueError(
            f"q has {q.shape[2]} tokens; it must have at most those of x, {x.shape[1]}"
        )
    return x[:, x.shape[1] - q.shape[2] :]
