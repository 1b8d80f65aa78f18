"""The operands of a call that all of its kernels have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .. import problem as calls
from . import forms
from .parameters import UNBOUNDED, Bias, Plan, Problem, Rows
from .variants import ELEMENTS, padded


@dataclass(frozen=True)
class Shared:
    """The operands that all kernels of a call have, besides q, k and v.

    form, operands: those of `forms.operands`. rows: those of the sequences.
    """

    call: calls.Problem
    form: str
    operands: dict[str, Tensor | int]
    rows: Tensor | None

    @staticmethod
    def of(problem: calls.Problem) -> Shared:
        form, operands = forms.operands(problem.form, problem.q.dtype)
        operands = {name: _with_contiguous_rows(x) for name, x in operands.items()}
        rows = None if problem.sequences is None else problem.sequences.rows.contiguous()
        return Shared(problem, form, operands, rows)

    @property
    def arguments(self) -> tuple[str, str, int, int]:
        """The arguments of a variant."""
        q, v = self.call.q, self.call.v
        return self.form, ELEMENTS[q.dtype], padded(q.shape[3]), padded(v.shape[3])

    @cached_property
    def bias(self) -> Bias:
        fields = self.operands.items()
        return Bias(**{name: x if isinstance(x, int) else Rows.of(x) for name, x in fields})

    def empty_gradient_of_vectors(self) -> Tensor | None:
        """Returns a result for the gradient of the queries' vectors, of padded channels."""
        if "query_vectors" not in self.operands:
            return None
        q, channels = self.call.q, self.operands["query_vectors"].shape[3]
        new = q.new_empty if self.call.sequences is None else q.new_zeros  # padding is not written
        return new(*q.shape[:3], channels, dtype=torch.float32)

    def problem(
        self, rows: int, block_m: int, order: Tensor | None, reach: Tensor | None = None
    ) -> Problem:
        """Returns the parameters of a kernel with one block per block_m of some rows per head.

        reach: that of blocks of keys, `schedule.reach_of_keys`.
        """
        call, geometry, heads = self.call, self.call.geometry, self.call.q.shape[1]
        keys = (None, None) if call.plan is None else call.plan
        queries = (None, None) if reach is None else reach
        return Problem(
            heads=heads,
            group=heads // call.k.shape[1],
            n_query=geometry.n_query,
            n_key=geometry.n_key,
            shift=geometry.shift,
            window=UNBOUNDED if geometry.window is None else geometry.window,
            causal=geometry.causal,
            packed=call.sequences is not None and call.sequences.is_packed,
            blocks=-(-rows // block_m),
            scale=call.scale,
            sequences=address(self.rows),
            plan=Plan(Rows.of(keys[0]), address(keys[1]), Rows.of(queries[0]), address(queries[1])),
            order=address(order),
        )

    def tensors(self, *others: Tensor | None) -> list[Tensor]:
        """Returns the tensors whose addresses are in the parameters, with those of a kernel."""
        every = *others, *self.operands.values(), self.rows, self.call.plan
        return [x for x in every if isinstance(x, Tensor)]


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _with_contiguous_rows(x: Tensor | int) -> Tensor | int:
    is_suitable = isinstance(x, int) or x.dim() != 3 or x.stride(2) == 1
    return x if is_suitable else x.contiguous()
