"""Biases that are products of a vector per query, or per key, and a vector per distance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..forms import Geometry, Relative
from ..forms.relative import BEYOND, MAX_RANK, columns
from .base import positive_int
from .cumulative import described

Table = Tensor | Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """b_ij = sum_r U[i, r] P[r, d] + sum_r W[j, r] Q[r, d], where d = p_i - j.

    U holds a vector per query and W one per key; P and Q hold a vector per distance. Either term
    may be absent. Its vectors have 1 to 128 entries, the rank R of the term. The largest number of
    heads of any of these tensors is that of the bias.

    Factors and tables keep their dtype if all of them have the same, and are converted to float32
    or, for float64 queries, float64 otherwise.

    Args:
        query_factors: U, (B or 1, H or 1, queries, R); for packed sequences (1, H or 1, total, R).
        query_tables: P, (H or 1, R, n), for the n distances from `first` on; or a function that
            maps any distances (n,) in float64, ascending, to such a table.
        key_factors: W, (B or 1, H or 1, keys, R). In decoding it has the rows of all keys so far,
            and for `context_parallel_attention` those of all keys of the sequence.
        key_tables: Q, for the same distances as P.
        first: the distance of the first column of the tables, negative for keys after the query.
        beyond: the bias at distances outside the tables: "zero" for 0, "last" for that of the
            nearest distance of the tables.

    Raises TypeError or ValueError for invalid arguments.
    """

    query_factors: Tensor | None = None
    query_tables: Table | None = None
    key_factors: Tensor | None = None
    key_tables: Table | None = None
    first: int = 0
    beyond: str = "zero"

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
        queries = self._term(self.query_factors, self.query_tables, geometry)
        keys = self._term(self.key_factors, self.key_tables, geometry)
        given = queries or keys
        queries = queries or _absent(given, geometry.query_rows)
        keys = keys or _absent(given, geometry.key_rows)
        tensors = *queries, *keys
        dtypes = {x.dtype for x in tensors}
        if len(dtypes) > 1 or torch.float64 in (dtype, *dtypes):
            tensors = [x.to(dtype) for x in tensors]
        return Relative(*tensors, beyond=self.beyond)

    def dense(self, n_query: int, n_key: int) -> Tensor:
        """The bias of every pair, (B or 1, H or 1, n_query, n_key) float64, unmasked."""
        geometry = Geometry(n_query, n_key, causal=False)
        return self.lower(geometry, torch.float64, self._factors()[0].device).dense(geometry)

    def _term(
        self, factors: Tensor | None, table: Table | None, geometry: Geometry
    ) -> tuple[Tensor, Tensor] | None:
        if factors is None:
            return None
        if isinstance(table, Tensor):
            end = self.first + table.shape[-1]
            begin, end = _range(self.first, end, geometry.causal)
            table = columns(table, begin - self.first, end - begin, self.beyond)
        else:
            table = self._evaluated(table, factors, geometry)
        if factors.shape[-1] > 1 and factors.stride(-1) != 1:
            factors = factors.contiguous()
        return factors, table[None]

    def _evaluated(self, function: Callable, factors: Tensor, geometry: Geometry) -> Tensor:
        """The function's table over all distances of the geometry."""
        end = geometry.first_distance + geometry.n_distances
        begin, end = _range(geometry.first_distance, end, geometry.causal)
        d = torch.arange(begin, end, dtype=torch.float64, device=factors.device)
        table = function(d)
        shapes = [(h, factors.shape[-1], len(d)) for h in dict.fromkeys((self.num_heads, 1))]
        if not isinstance(table, Tensor) or tuple(table.shape) not in shapes:
            got = tuple(table.shape) if isinstance(table, Tensor) else type(table).__name__
            raise ValueError(
                f"the function of distances returned {got} for {len(d)} distances; it must return"
                f" a tensor of shape {' or '.join(map(str, shapes))}"
            )
        return table

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


def _absent(given: tuple[Tensor, Tensor], rows: int) -> tuple[Tensor, Tensor]:
    """Factors and a table of rank 0, alike to the given ones."""
    factors, table = given
    return factors.new_zeros(1, 1, rows, 0), table.new_zeros(1, 1, 0, table.shape[-1])


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


def check_states(x: Tensor, dim: int) -> None:
    """Validates that x is (B, N, dim)."""
    check_tensor("x", x, 3, f"(B, N, {dim})")
    if x.shape[-1] != dim:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be (B, N, {dim})")
