"""Maps each form to the operands of the kernels, and the kernels' results to gradients of its
tensors.

bias/tile.py evaluates a form in a tile, and attention/backward_table.py computes the gradient of a
table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
from torch import Tensor
from triton.language import constexpr

from ... import problem as calls
from ...forms.cumulative import in_float32
from ...forms.gradients import sum_of_rows, sums_gradient
from ..operands import Bias, Function, VectorTables, padded_table, per_head
from ..primitives import LOG2E


@dataclass(frozen=True)
class Gathered:
    """The results of the backward kernels, float32: see bias/gradients.py.

    grad_gain: (B, H, Nq), or the gradient of every pair, (B, H, Nq, Nk). grad_others: of the
    queries' other operands: (B, H, Nq), (B, H, Nq, R) or, of each block of each sequence,
    (sequences, H, blocks, 2 segments). grad_keys: (B, H, Nk) or (B, H, Nk, R). table: computes the
    gradient of a distance table, or those of the two tables of a relative bias.
    """

    problem: calls.Problem
    grad_gain: Tensor
    grad_others: Tensor
    grad_keys: Tensor
    table: Callable[[], Tensor | list[Tensor]]


@dataclass(frozen=True)
class Kernels:
    """How the kernels compute a form.

    names: the operands, fields of Bias, that its first tensors are.
    gradients: maps the kernels' results to the gradients of its tensors, before the reduction of
        broadcast dimensions.
    of_tiles, of_pages: map its tensors to operands that differ from `names`, for attention and for
        decoding.
    may_be_factored: whether unmasked tiles of block_m queries can use factors (bias/factors.py) or
        need none, given its tensors.
    trains_queries, trains_keys: whether the backward kernels of queries and of keys compute
        gradients of its operands.
    squared: whether the bias is -log(1 + beta^2).
    function: returns the function that the tensors describe, if they describe one.
    tables: returns the tables of a relative bias.
    """

    names: tuple[str, ...]
    gradients: Callable[[Gathered], list[Tensor]]
    of_tiles: Callable[..., dict] = lambda *tensors: {}
    of_pages: Callable[..., dict] = lambda *tensors: {}
    may_be_factored: Callable[..., bool] = lambda block_m, *tensors: False
    trains_queries: bool = False
    trains_keys: bool = False
    squared: bool = False
    function: Callable[..., Function] | None = None
    tables: Callable[..., VectorTables] | None = None

    def bias(self, tensors: tuple[Tensor, ...], dtype: torch.dtype) -> Bias:
        """Returns the kernels' operands, without factors. dtype: that of q."""
        if self.tables is not None:  # operands of matrix products
            tensors = [x.to(dtype) for x in tensors]
        return self._bias(tensors, self.of_tiles(*tensors))

    def bias_of_pages(self, tensors: tuple[Tensor, ...]) -> Bias:
        """Returns the operands for decoding, where per-token tensors are in pages."""
        return self._bias(tensors, self.of_pages(*tensors))

    def padded_ranks(self, tensors: tuple[Tensor, ...]) -> int:
        """Returns the sum of the padded ranks of both terms of a relative bias, 0 for others."""
        ranks = (x.shape[3] for x in (tensors[0], tensors[2])) if self.tables is not None else ()
        return sum(max(16, triton.next_power_of_2(rank)) for rank in ranks if rank)

    def _bias(self, tensors: Sequence[Tensor], others: dict[str, Tensor | None]) -> Bias:
        operands = dict(zip(self.names, tensors, strict=False)) | others
        return Bias(
            *map(constexpr, (bool(operands), self.squared)),
            **{name: per_head(x) for name, x in operands.items()},
            function=self.function and self.function(*tensors),
            vector_tables=self.tables and self.tables(*tensors),
        )


def empty_gradients(
    bias: Bias, problem: calls.Problem, blocks: int, *, of_pairs: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns grad_gain, grad_others and grad_keys of Gathered, 0 where no kernel writes.

    blocks: the number of blocks of queries of a sequence. of_pairs: whether dS is an output.
    """
    batch, heads, n_query, n_key = *problem.q.shape[:3], problem.k.shape[2]
    of_gain, of_others, of_keys = ([batch, heads, n] for n in (n_query, n_query, n_key))
    partly_written = problem.sequences is not None
    if bias.function is not None:
        of_others = problem.batch, heads, blocks, 2 * bias.function.segments.value
    elif bias.vector_tables is not None:
        of_others.append(bias.vector_tables.query_rank.value)
        of_keys.append(bias.vector_tables.key_rank.value)
    elif bias.of_pairs is not None and of_pairs:
        of_gain.append(n_key)
        partly_written = True  # tiles without visible pairs are skipped
    new = problem.q.new_zeros if partly_written else problem.q.new_empty
    return tuple(new(shape, dtype=torch.float32) for shape in (of_gain, of_others, of_keys))


def _always(block_m: int, *tensors: Tensor) -> bool:
    return True


def _sums(sums: Tensor, *gain: Tensor) -> dict:
    return dict(zip(("high", "low"), in_float32(sums), strict=True))


def _slopes_gradients(gathered: Gathered) -> list[Tensor]:
    (slopes,) = gathered.problem.form.tensors
    return [-sum_of_rows(gathered.grad_gain, slopes.shape[0], gathered.problem.sequences)]


def _sums_gradients(gathered: Gathered) -> list[Tensor]:
    sequences = gathered.problem.sequences
    of_sums = sums_gradient(gathered.grad_others, gathered.grad_keys, sequences)
    return [of_sums, gathered.grad_gain][: len(gathered.problem.form.tensors)]


def _function(
    table: Tensor, gain: Tensor, knots: Tensor, slopes: Tensor, intercepts: Tensor
) -> Function:
    count = knots.shape[2]
    segments = constexpr(triton.next_power_of_2(count + 1))
    return Function(*map(per_head, (knots, slopes, intercepts)), count, segments)


def _normalized_gradients(gathered: Gathered) -> list[Tensor]:
    _, _, knots, slopes, _ = gathered.problem.form.tensors
    of_lines = gathered.grad_others.sum(2).unflatten(2, (2, -1))
    of_intercepts, of_slopes = of_lines[..., : slopes.shape[2]].unbind(2)
    grad_knots = torch.zeros_like(knots)
    return [gathered.table(), gathered.grad_gain, grad_knots, of_slopes, of_intercepts]


def _vectors(vectors: Tensor, _, key_vectors: Tensor, __) -> dict:
    return {"query_vectors": _present(vectors), "key_vectors": _present(key_vectors)}


def _products(vectors: Tensor, table: Tensor, key_vectors: Tensor, _, *, last: bool) -> dict:
    """Returns the operands of few queries. The table of a query holds the products of its vector,
    (B or 1, H or 1, Nq, n + 1), the last one for all distances beyond."""
    products = None
    if _present(vectors) is not None:
        products = (vectors.double() @ table.double()).float()
        beyond = products[..., -1:] if last else torch.zeros_like(products[..., -1:])
        products = torch.cat([products, beyond], -1)
    return {"table": products, "key_vectors": _present(key_vectors)}


def _present(vectors: Tensor) -> Tensor | None:
    return vectors if vectors.shape[3] else None


def _tables(_, query_tables: Tensor, __, key_tables: Tensor, *, last: bool) -> VectorTables:
    tables = [x.mT.contiguous() for x in (query_tables, key_tables)]
    columns, ranks = tables[0].shape[2], (constexpr(x.shape[3]) for x in tables)
    return VectorTables(*map(per_head, tables), columns, *ranks, constexpr(last))


def _relative_gradients(gathered: Gathered) -> list[Tensor]:
    of_query_tables, of_key_tables = gathered.table()
    return [gathered.grad_others, of_query_tables, gathered.grad_keys, of_key_tables]


def _relative(*, last: bool) -> Kernels:
    return Kernels(
        (),
        _relative_gradients,
        _vectors,
        partial(_products, last=last),
        may_be_factored=lambda block_m, *tensors: not last,
        trains_queries=True,
        trains_keys=True,
        tables=partial(_tables, last=last),
    )


# The form whose configurations suit kernels that evaluate the bias pair by pair.
PAIRWISE = "log1p_square"
_SUMS = Kernels(("sums", "gain"), _sums_gradients, _sums, trains_queries=True, trains_keys=True)
FORMS = {
    "none": Kernels((), lambda gathered: []),
    "linear": Kernels(("slopes",), _slopes_gradients, may_be_factored=_always, trains_queries=True),
    "distance": Kernels(
        ("table",),
        lambda gathered: [gathered.table()],
        lambda table: {"table": padded_table(table * LOG2E.value)},
        may_be_factored=lambda block_m, table: table.shape[2] >= 2 * block_m,
    ),
    "cumulative": replace(_SUMS, may_be_factored=_always),
    "log1p_square": replace(_SUMS, squared=True),
    "dense": Kernels(("of_pairs",), lambda gathered: [gathered.grad_gain], trains_queries=True),
    "normalized": Kernels(
        ("table", "gain"),
        _normalized_gradients,
        lambda table, *others: {"table": padded_table(table)},
        trains_queries=True,
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
