"""The kernels on tensors: forward and backward passes of a problem."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .. import problem as calls
from .. import schedule
from . import forms, table_gradient
from .launch import Launcher, addressable
from .parameters import (
    UNBOUNDED,
    BackwardParams,
    Bias,
    DeltaParams,
    ForwardParams,
    Plan,
    Problem,
    Rows,
)
from .variants import (
    BLOCK_M,
    ELEMENTS,
    GROUP_M,
    ROWS_OF_DELTA,
    Backward,
    BackwardKeys,
    BackwardQueries,
    Delta,
    Variant,
    padded,
)


def forward(launcher: Launcher, problem: calls.Problem) -> tuple[Tensor, Tensor]:
    """Returns o (B, H, Nq, Dv) in q's dtype and lse (B, H, Nq) in float32."""
    q, k, v = (addressable(x) for x in (problem.q, problem.k, problem.v))
    o, lse = problem.empty_results()
    shared = Shared.of(problem)
    variant = Variant(*shared.arguments)
    order = None if problem.plan is None else schedule.for_queries(problem, variant.block_m)
    fields = shared.problem(problem.geometry.n_query, variant.block_m, order)
    programs = problem.batch * q.shape[1] * fields.blocks
    grid = min(programs, launcher.driver.multiprocessors(q.device))
    tickets = q.new_zeros(1, dtype=torch.int32) if grid < programs else None
    params = ForwardParams(
        launcher.tensor_map(q, GROUP_M),
        *(launcher.tensor_map(x, variant.tile.block_n) for x in (k, v)),
        fields,
        shared.bias,
        *(Rows.of(o), Rows.of(lse), v.shape[3], programs, _address(tickets)),
    )
    launcher.launch(variant, grid, params, shared.tensors(q, k, v, o, lse, order, tickets))
    return o, lse


def backward(
    launcher: Launcher,
    problem: calls.Problem,
    o: Tensor,
    lse: Tensor,
    grad_o: Tensor,
    grad_lse: Tensor,
    form_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Returns the gradients of q, k, v and, with form_gradient, of the form's tensors."""
    q, k, v, grad_o = (addressable(x) for x in (problem.q, problem.k, problem.v, grad_o))
    statistics = _delta(launcher, o, grad_o, lse, grad_lse)
    grads = problem.empty_gradients()
    queries, keys = q.shape[:3], (*q.shape[:2], k.shape[2])
    sums = [q.new_empty(shape, dtype=torch.float32) for shape in (queries, queries, keys)]
    if problem.sequences is not None:  # the kernels do not write padding rows
        for x in sums:
            x.zero_()
    shared = Shared.of(problem)
    table_sums = None
    if form_gradient and "table" in shared.operands:
        table_sums = table_gradient.partial_sums(problem)
    box = BackwardQueries(*shared.arguments, form_gradient).tile.block_n
    maps = [launcher.tensor_map(x, box) for x in (q, k, v, grad_o)]
    grad_vectors = shared.empty_gradient_of_vectors() if form_gradient else None
    results = *statistics, *grads, *sums, table_sums, grad_vectors
    others = 1 if table_sums is None else table_sums.shape[2], q.shape[3], v.shape[3]

    def launch(kind: type[Backward], heads: int, rows: int, order: Tensor | None) -> None:
        fields = shared.problem(rows, BLOCK_M, order)
        params = BackwardParams(*maps, fields, shared.bias, *map(Rows.of, results), *others)
        grid = problem.batch * heads * fields.blocks if order is None else len(order)
        tensors = shared.tensors(q, k, v, grad_o, *results, order)
        for variant in kind.all_of(*shared.arguments, form_gradient):
            launcher.launch(variant, grid, params, tensors)

    geometry, query_order, key_order = problem.geometry, None, None
    if problem.plan is not None:
        query_order = schedule.for_queries(problem, BLOCK_M)
        reach = schedule.reach_of_keys(problem, BLOCK_M)
        key_order = schedule.for_keys(problem, BLOCK_M, reach)
    for order in table_gradient.launches(problem, table_sums, query_order):
        launch(BackwardQueries, q.shape[1], geometry.n_query, order)
    launch(BackwardKeys, k.shape[1], geometry.n_key, key_order)
    if not form_gradient:
        return *grads, []
    grad_form = [
        grad.sum_to_size(x.shape).to(x.dtype)
        for grad, x in zip(
            forms.gradients(problem, forms.Results(*sums, table_sums, grad_vectors)),
            problem.form.tensors,
            strict=True,
        )
    ]
    return *grads, grad_form


def _delta(
    launcher: Launcher, o: Tensor, grad_o: Tensor, lse: Tensor, grad_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns lse in base 2 and dO . o - dlse of each query."""
    statistics = torch.empty_like(lse), torch.empty_like(lse)
    tensors = o, grad_o, lse, grad_lse, *statistics
    batch, heads, n, value_dim = o.shape
    params = DeltaParams(*map(Rows.of, tensors), batch, heads, n, value_dim)
    grid = -(-batch * heads * n // ROWS_OF_DELTA)
    launcher.launch(Delta(ELEMENTS[o.dtype]), grid, params, tensors)
    return statistics


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

    def problem(self, rows: int, block_m: int, order: Tensor | None) -> Problem:
        """Returns the parameters of a kernel with one block per block_m of some rows per head."""
        call, geometry, heads = self.call, self.call.geometry, self.call.q.shape[1]
        first_key, end_key = (None, None) if call.plan is None else call.plan
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
            sequences=_address(self.rows),
            plan=Plan(Rows.of(first_key), _address(end_key)),
            order=_address(order),
        )

    def tensors(self, *others: Tensor | None) -> list[Tensor]:
        """Returns the tensors whose addresses are in the parameters, with those of a kernel."""
        every = *others, *self.operands.values(), self.rows, self.call.plan
        return [x for x in every if isinstance(x, Tensor)]


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _with_contiguous_rows(x: Tensor | int) -> Tensor | int:
    is_suitable = isinstance(x, int) or x.dim() != 3 or x.stride(2) == 1
    return x if is_suitable else x.contiguous()
