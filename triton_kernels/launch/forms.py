"""Maps each form to the operands of the kernels, and the kernels' results to gradients of its
tensors.

bias/tile.py evaluates a form in a tile, and attention/backward_table.py computes the gradient of a
table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
from torch import Tensor
from triton.language import constexpr

from ... import problem as calls
from ...forms import Form
from ...sequences import Sequences
from ..operands import Bias, Function, Tables, padded_table, per_head, rows
from ..primitives import LOG2E


@dataclass(frozen=True)
class Gathered:
    """The results of the backward kernels, float32.

    grad_gain: (B, H, Nq), the gradient of the gains; for a dense bias (B, H, Nq, Nk), that of the
    bias. grad_query_sums: (B, H, Nq), the gradient of the prefix sums at the queries.
    grad_key_sums: (B, H, Nk), the gradient of the prefix sums at the keys. For a relative bias,
    these two are (B, H, Nq, R) and (B, H, Nk, R'), those of the vectors. grad_lines: (B, H, 2,
    segments), the gradients of the intercepts and slopes of a function, or None. table: computes
    the gradient of a distance table, or those of the two tables of a relative bias.
    """

    problem: calls.Problem
    grad_gain: Tensor
    grad_query_sums: Tensor
    grad_key_sums: Tensor
    grad_lines: Tensor | None
    table: Callable[[], Tensor | list[Tensor]]


@dataclass(frozen=True)
class Kernels:
    """How the kernels compute a form.

    form: its name in the kernels. squared: whether the bias is -log(1 + beta^2).
    operands: maps its tensors to the fields of Bias.
    gradients: maps the kernels' results to the gradients of its tensors, before the reduction of
        broadcast dimensions.
    may_be_factored: whether unmasked tiles of block_m queries can use factors (bias/factors.py),
        given its tensors.
    has_gain, has_sums: whether the backward kernels compute gradients of gains and of prefix sums.
    has_pairs: whether they compute gradients of pairs instead of gains.
    function: returns the function that the tensors describe, if they describe one.
    tables: returns the tables of a relative bias.
    """

    form: str
    operands: Callable[..., dict]
    gradients: Callable[[Gathered], list[Tensor]]
    squared: bool = False
    may_be_factored: Callable[..., bool] = lambda block_m, *tensors: True
    has_gain: bool = False
    has_sums: bool = False
    has_pairs: bool = False
    function: Callable[..., Function] | None = None
    tables: Callable[..., Tables] | None = None

    def bias(self, tensors: tuple[Tensor, ...], dtype: torch.dtype) -> Bias:
        """Returns the kernels' operands, without factors. dtype: that of q."""
        if self.tables is not None:  # operands of matrix products
            tensors = [x.to(dtype) for x in tensors]
        operands = {"terms": None, "gain": None, **self.operands(*tensors)}
        operands = {name: per_head(x) for name, x in operands.items()}
        tables = self.tables and self.tables(*tensors)
        return Bias(*self._flags(), **operands, function=self._function(*tensors), tables=tables)

    def padded_ranks(self, tensors: tuple[Tensor, ...]) -> int:
        """Returns the sum of the padded ranks of both terms of a relative bias, 0 for others."""
        ranks = (x.shape[3] for x in (tensors[0], tensors[2])) if self.tables is not None else ()
        return sum(max(16, triton.next_power_of_2(rank)) for rank in ranks if rank)

    def bias_of_pages(self, form: Form) -> Bias:
        """Returns the operands for decoding, where per-token tensors are in pages."""
        if self.tables is not None:
            return self._products_of_queries(form.tensors)
        terms, gain = (*form.tensors, None, None)[:2]
        terms = rows(terms) if form.per_token else per_head(terms)
        function = self._function(*form.tensors)
        return Bias(*self._flags(), terms, per_head(gain), function=function)

    def _products_of_queries(self, tensors: tuple[Tensor, ...]) -> Bias:
        """Returns a relative bias of few queries, of which terms holds every value: (B or 1, H or
        1, Nq, n + 1), the last one for all distances beyond the tables."""
        vectors, table, key_vectors, _ = tensors
        tables, terms = self.tables(*tensors), None
        if table.shape[2]:
            products = (vectors.double() @ table.double()).float()
            last = products[..., -1:]
            beyond = last if tables.last.value else torch.zeros_like(last)
            terms = per_head(torch.cat([products, beyond], -1))
        key_vectors = per_head(key_vectors) if key_vectors.shape[3] else None
        return Bias(*self._flags(), terms, None, key_vectors=key_vectors, tables=tables)

    def _function(self, *tensors: Tensor) -> Function | None:
        return self.function and self.function(*tensors)

    def _flags(self) -> tuple[constexpr, ...]:
        return tuple(map(constexpr, (self.form, self.squared, False)))


def _never(block_m: int, *tensors: Tensor) -> bool:
    return False


def _sums(sums: Tensor, gain: Tensor | None = None) -> dict:
    high = sums.float()
    low = torch.where(high.isfinite(), sums - high, 0).float()
    return {"terms": sums, "gain": gain, "high": high, "low": low}


def _slopes_gradients(gathered: Gathered) -> list[Tensor]:
    (slopes,) = gathered.problem.form.tensors
    return [-_sum_of_rows(gathered.grad_gain, slopes.shape[0], gathered.problem.sequences)]


def _sums_gradients(gathered: Gathered) -> list[Tensor]:
    sequences = gathered.problem.sequences
    of_sums = _sums_gradient(gathered.grad_query_sums, gathered.grad_key_sums, sequences)
    return [of_sums, gathered.grad_gain][: len(gathered.problem.form.tensors)]


def _function(
    table: Tensor, gain: Tensor, knots: Tensor, slopes: Tensor, intercepts: Tensor
) -> Function:
    count = knots.shape[2]
    segments = constexpr(triton.next_power_of_2(count + 1))
    return Function(*map(per_head, (knots, slopes, intercepts)), count, segments)


def _normalized_gradients(gathered: Gathered) -> list[Tensor]:
    _, _, knots, slopes, _ = gathered.problem.form.tensors
    of_intercepts, of_slopes = gathered.grad_lines[..., : slopes.shape[2]].unbind(2)
    grad_knots = torch.zeros_like(knots)
    return [gathered.table(), gathered.grad_gain, grad_knots, of_slopes, of_intercepts]


def _vectors(query_vectors: Tensor, _, key_vectors: Tensor, __) -> dict:
    vectors = {"query_vectors": query_vectors, "key_vectors": key_vectors}
    return {name: x if x.shape[3] else None for name, x in vectors.items()}


def _tables(_, query_tables: Tensor, __, key_tables: Tensor, *, last: bool) -> Tables:
    of_terms = [
        per_head(x.mT.contiguous()) if x.shape[2] else None for x in (query_tables, key_tables)
    ]
    ranks = (constexpr(x.shape[2]) for x in (query_tables, key_tables))
    return Tables(*of_terms, query_tables.shape[3], *ranks, constexpr(last))


def _relative_gradients(gathered: Gathered) -> list[Tensor]:
    of_query_tables, of_key_tables = gathered.table()
    return [gathered.grad_query_sums, of_query_tables, gathered.grad_key_sums, of_key_tables]


def _relative(*, last: bool) -> Kernels:
    return Kernels(
        "relative",
        _vectors,
        _relative_gradients,
        may_be_factored=_never,
        has_gain=True,
        has_sums=True,
        tables=partial(_tables, last=last),
    )


# The form whose configurations suit kernels that evaluate the bias pair by pair.
PAIRWISE = "log1p_square"
FORMS = {
    "none": Kernels("none", dict, lambda gathered: [], may_be_factored=_never),
    "linear": Kernels("linear", lambda slopes: {"terms": slopes}, _slopes_gradients, has_gain=True),
    "distance": Kernels(
        "distance",
        lambda table: {"terms": padded_table(table * LOG2E.value)},
        lambda gathered: [gathered.table()],
        may_be_factored=lambda block_m, table: table.shape[2] >= 2 * block_m,
    ),
    "cumulative": Kernels("cumulative", _sums, _sums_gradients, has_gain=True, has_sums=True),
    "log1p_square": Kernels(
        *("cumulative", _sums, _sums_gradients),
        squared=True,
        may_be_factored=_never,
        has_gain=True,
        has_sums=True,
    ),
    "dense": Kernels(
        "dense",
        lambda bias: {"terms": bias},
        lambda gathered: [gathered.grad_gain],
        may_be_factored=_never,
        has_gain=True,
        has_pairs=True,
    ),
    "normalized": Kernels(
        "normalized",
        lambda table, gain, *function: {"terms": padded_table(table), "gain": gain},
        _normalized_gradients,
        may_be_factored=_never,
        has_gain=True,
        function=_function,
    ),
    "relative": _relative(last=False),
    "relative_last": _relative(last=True),
}


def kernels_of(problem: calls.Problem) -> Kernels:
    """Returns the entry of FORMS for the problem's form."""
    name = problem.form.name
    if name not in FORMS:
        raise ValueError(
            f"the bias has the form {name!r}, for which backend 'triton' has no kernels; it has"
            f" those of {', '.join(FORMS)}. backend='reference' computes it with O(N^2) memory"
        )
    return FORMS[name]


def _sum_of_rows(x: Tensor, entries: int, sequences: Sequences | None) -> Tensor:
    """Sums (B, H, n) over rows to (B, H) float64. For packed sequences, each sequence is summed
    separately if the form has several batch entries."""
    if sequences is None or not sequences.is_packed or entries == 1:
        return x.sum(-1, dtype=torch.float64)
    each = x.split(sequences.rows[:, 1].tolist(), -1)
    return torch.cat([one.sum(-1, dtype=torch.float64) for one in each])


def _sums_gradient(
    grad_query_sums: Tensor, grad_key_sums: Tensor, sequences: Sequences | None
) -> Tensor:
    """Returns the gradient of C, (B, H, places) float64, from those at the queries and at the
    keys."""
    gradient = grad_key_sums.double()
    if sequences is not None and (sequences.is_packed or sequences.longest_shift):
        # Each place has at most one query. Queries before the first key are added to an extra
        # place.
        room = torch.nn.functional.pad(gradient, (0, sequences.places + 1 - gradient.shape[-1]))
        place = sequences.keys_of_queries().unsqueeze(-2).expand(grad_query_sums.shape)
        return room.scatter_add_(-1, place, grad_query_sums.double())[..., :-1]
    shown = min(grad_query_sums.shape[2], grad_key_sums.shape[2])
    gradient[..., grad_key_sums.shape[2] - shown :] += grad_query_sums[
        ..., grad_query_sums.shape[2] - shown :
    ]
    return gradient
