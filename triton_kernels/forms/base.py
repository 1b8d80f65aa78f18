"""What launching the kernels needs to know about a form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ... import problem as calls
from ..operands import Bias, Bounds, FormFunctions, Function, VectorTables, per_head


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
    functions: its device functions.
    gradients: maps the kernels' results to the gradients of its tensors, before the reduction of
        broadcast dimensions.
    for_tiles, for_pages: map its tensors to operands that differ from `names`, for attention and
        for decoding.
    table_bounds: maps the operands for decoding to the bounds of tables that differ from those of
        TileBounds.
    gradient_shapes: maps the operands, the problem and the number of blocks of queries of a
        sequence to the shapes of Gathered's tensors that differ from (B, H, N).
    may_be_factored: whether unmasked tiles of block_m queries can use factors (bias/factors.py) or
        need none, given its tensors.
    trains_queries, trains_keys: whether the backward kernels of queries and of keys compute
        gradients of its operands.
    stores_pairs: whether they store dS, in tiles with visible pairs.
    function: returns the function that the tensors describe, if they describe one.
    tables: returns the tables of a relative bias.
    """

    names: tuple[str, ...]
    functions: FormFunctions
    gradients: Callable[[Gathered], list[Tensor]]
    for_tiles: Callable[..., dict] = lambda *tensors: {}
    for_pages: Callable[..., dict] = lambda *tensors: {}
    table_bounds: Callable[[Bias], dict] = lambda bias: {}
    gradient_shapes: Callable[..., dict] = lambda bias, problem, blocks: {}
    may_be_factored: Callable[..., bool] = lambda block_m, *tensors: False
    trains_queries: bool = False
    trains_keys: bool = False
    stores_pairs: bool = False
    function: Callable[..., Function] | None = None
    tables: Callable[..., VectorTables] | None = None

    def bias(self, tensors: tuple[Tensor, ...], dtype: torch.dtype) -> Bias:
        """Returns the kernels' operands, without factors. dtype: that of q."""
        if self.tables is not None:  # operands of matrix products
            tensors = [x.to(dtype) for x in tensors]
        return self._bias(tensors, self.for_tiles(*tensors))

    def bias_of_pages(self, tensors: tuple[Tensor, ...]) -> Bias:
        """Returns the operands for decoding, where per-token tensors are in pages."""
        return self._bias(tensors, self.for_pages(*tensors))

    def bounds_of_pages(self, bounds: calls.TileBounds, bias: Bias) -> Bounds:
        """Returns the bounds for decoding. bias: the operands for it."""
        tensors = bounds._asdict() | self.table_bounds(bias)
        return Bounds(**{name: per_head(x) for name, x in tensors.items()})

    def padded_ranks(self, tensors: tuple[Tensor, ...]) -> int:
        """Returns the sum of the padded ranks of both terms of a relative bias, 0 for others."""
        ranks = (x.shape[3] for x in (tensors[0], tensors[2])) if self.tables is not None else ()
        return sum(max(16, triton.next_power_of_2(rank)) for rank in ranks if rank)

    def empty_gradients(
        self, bias: Bias, problem: calls.Problem, blocks: int, *, trained: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns grad_gain, grad_others and grad_keys of Gathered, 0 where no kernel writes."""
        batch, heads, n_query, n_key = *problem.q.shape[:3], problem.k.shape[2]
        shapes = {
            "grad_gain": (batch, heads, n_query),
            "grad_others": (batch, heads, n_query),
            "grad_keys": (batch, heads, n_key),
        }
        if trained:
            shapes |= self.gradient_shapes(bias, problem, blocks)
        partly_written = problem.sequences is not None or (trained and self.stores_pairs)
        new = problem.q.new_zeros if partly_written else problem.q.new_empty
        return tuple(new(shape, dtype=torch.float32) for shape in shapes.values())

    def _bias(self, tensors: Sequence[Tensor], others: dict[str, Tensor | None]) -> Bias:
        operands = dict(zip(self.names, tensors, strict=False)) | others
        return Bias(
            self.functions,
            **{name: per_head(x) for name, x in operands.items()},
            function=self.function and self.function(*tensors),
            vector_tables=self.tables and self.tables(*tensors),
        )


def always(block_m: int, *tensors: Tensor) -> bool:
    return True
