"""The kernels of the backward pass on tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import problem as calls
from .. import schedule
from . import forms, table_gradient
from .launch import Launcher, addressable
from .operands import Shared, address
from .parameters import BackwardParams, DeltaParams, Rows
from .variants import (
    BLOCK_M,
    ELEMENTS,
    ROWS_OF_DELTA,
    TILE_QUERIES,
    AnyVariant,
    Backward,
    BackwardAll,
    BackwardKeys,
    BackwardQueries,
    Delta,
)

MOST_OF_TILES = 4  # rows of tiles for each row of q, as short sequences do not fill theirs


def backward(
    launcher: Launcher,
    problem: calls.Problem,
    o: Tensor,
    pivot: Tensor,
    log_sum: Tensor,
    grad_o: Tensor,
    grad_lse: Tensor,
    form_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Returns the gradients of q, k, v and, with form_gradient, of the form's tensors."""
    q, k, v, grad_o = (addressable(x) for x in (problem.q, problem.k, problem.v, grad_o))
    grads = problem.empty_gradients()
    results = dict(zip(("grad_q", "grad_k", "grad_v"), grads, strict=True))
    results |= _delta(launcher, (o, grad_o, pivot, log_sum, grad_lse))
    shared = Shared.of(problem)
    inputs = {"q": q, "k": k, "v": v, "grad_o": grad_o}
    call = Pass(launcher, problem, shared, inputs, results, form_gradient)
    if BackwardAll.computes(*shared.arguments, problem.geometry.causal) and call.tiles_are_full:
        call.all_gradients()
    else:
        call.queries_and_keys()
    if not form_gradient:
        return *grads, []
    of_form = (results.get(name) for name in forms.Results._fields)
    grad_form = [
        grad.sum_to_size(x.shape).to(x.dtype)
        for grad, x in zip(
            forms.gradients(problem, forms.Results(*of_form)), problem.form.tensors, strict=True
        )
    ]
    return *grads, grad_form


def _delta(launcher: Launcher, given: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Returns lse in base 2 and dO . o - dlse of each query, given o, dO, pivot, log_sum and
    dlse."""
    o, _, pivot, _, _ = given
    statistics = {name: torch.empty_like(pivot) for name in ("lse_in_base_2", "delta")}
    tensors = *given, *statistics.values()
    batch, heads, n, value_dim = o.shape
    params = DeltaParams(*map(Rows.of, tensors), batch, heads, n, value_dim)
    grid = -(-batch * heads * n // ROWS_OF_DELTA)
    launcher.launch(Delta(ELEMENTS[o.dtype]), grid, params, tensors)
    return statistics


@dataclass(frozen=True)
class Pass:
    """The backward pass of a call.

    inputs, results: fields of `BackwardParams`; kernels write to results, which the methods add to.
    form_gradient: whether there are gradients of the form's tensors.
    """

    launcher: Launcher
    problem: calls.Problem
    shared: Shared
    inputs: dict[str, Tensor]
    results: dict[str, Tensor]
    form_gradient: bool

    @property
    def _tiles(self) -> int:
        """The tiles of queries of each entry and head: packed sequences have tiles of their own,
        and others may start later."""
        entries, _, n, _ = self.inputs["q"].shape
        return n // TILE_QUERIES + (self.problem.batch if entries == 1 else 1)

    @property
    def tiles_are_full(self) -> bool:
        """Whether sums of dq for whole tiles take memory like q: not for short packed sequences."""
        n = self.inputs["q"].shape[2]
        return TILE_QUERIES * (self._tiles - 1) <= MOST_OF_TILES * n

    def all_gradients(self) -> None:
        """Blocks of keys compute all gradients, and add those of queries in turn."""
        (variant,) = BackwardAll.all_of(*self.shared.arguments, self.form_gradient)
        problem, q, k = self.problem, self.inputs["q"], self.inputs["k"]
        if variant.has_sums:
            self._add_results(q, "grad_gain", "grad_query_sums")
        if variant.has_sums or variant.has_slopes:
            self._add_results(k, "grad_key_sums")
        order = reach = None
        if problem.plan is not None:
            reach = schedule.reach_of_keys(problem, BLOCK_M)
            order = schedule.in_turn_for_keys(problem, BLOCK_M, reach)
        programs = self._programs(k, problem.geometry.n_key, order, last_first=False)
        tiles = self._tiles
        count = q.shape[0] * q.shape[1] * tiles
        counters = q.new_zeros(count + len(programs), dtype=torch.int32)
        turns, *tickets = counters.split([count, *[1] * len(programs)])
        query_sums = q.new_empty(count * variant.sums_bytes, dtype=torch.uint8)
        others = {"query_sums": query_sums, "turns": turns}
        for numbers, started in zip(programs, tickets, strict=True):
            others["tickets"] = started
            self._launch(variant, k, problem.geometry.n_key, numbers, reach, tiles, **others)
        self._launch(variant.store, q, problem.geometry.n_query, None, None, tiles, **others)

    def queries_and_keys(self) -> None:
        """Blocks of queries compute dq, and blocks of keys dk and dv."""
        problem, q, k = self.problem, self.inputs["q"], self.inputs["k"]
        arguments = *self.shared.arguments, self.form_gradient
        if self.form_gradient:
            self._add_results(q, "grad_gain", "grad_query_sums")
            self._add_results(k, "grad_key_sums")
            self.results["grad_query_vectors"] = self.shared.empty_gradient_of_vectors()
        query_order = key_order = reach = None
        if problem.plan is not None:
            query_order = schedule.for_queries(problem, BLOCK_M)
            reach = schedule.reach_of_keys(problem, BLOCK_M)
            key_order = schedule.for_keys(problem, BLOCK_M, reach)
        n_query, n_key = problem.geometry.n_query, problem.geometry.n_key
        for numbers in self._programs(q, n_query, query_order, last_first=True):
            for variant in BackwardQueries.all_of(*arguments):
                self._launch(variant, q, n_query, numbers)
        for variant in BackwardKeys.all_of(*arguments):
            self._launch(variant, k, n_key, key_order, reach)

    def _add_results(self, like: Tensor, *names: str) -> None:
        """Adds numbers of rows of q or k."""
        # The kernels do not write padding rows.
        new = like.new_empty if self.problem.sequences is None else like.new_zeros
        shape = *self.inputs["q"].shape[:2], like.shape[2]
        self.results.update({name: new(shape, dtype=torch.float32) for name in names})

    def _programs(
        self, like: Tensor, rows: int, order: Tensor | None, last_first: bool
    ) -> list[Tensor | None]:
        """Returns the program numbers of each launch of the kernel that sums the gradient of a
        table, if there is one: in `order` or, if None, of the last or first rows first."""
        if not (self.form_gradient and "table" in self.shared.operands):
            return [order]
        heads, blocks = like.shape[1], -(-rows // BLOCK_M)
        sums = table_gradient.partial_sums(self.problem, heads, blocks)
        self.results["grad_table"] = sums
        shape = self.problem.batch, heads, blocks
        return table_gradient.launches(sums, shape, order, last_first)

    def _launch(
        self,
        variant: AnyVariant,
        like: Tensor,
        rows: int,
        order: Tensor | None,
        reach: Tensor | None = None,
        tiles: int = 0,
        **others: Tensor,
    ) -> None:
        """Launches a kernel with a block for some of the `rows` of each head of q or k."""
        fields = self.shared.problem(rows, variant.block_m, order, reach)
        maps = {}
        if isinstance(variant, Backward):
            box = variant.tile.block_n
            maps = {name: self.launcher.tensor_map(x, box) for name, x in self.inputs.items()}
        results = {name: Rows.of(x) for name, x in self.results.items()}
        table = self.results.get("grad_table")
        params = BackwardParams(
            **maps,
            problem=fields,
            bias=self.shared.bias,
            **results,
            slots=1 if table is None else table.shape[2],
            head_dim=self.inputs["q"].shape[3],
            value_dim=self.inputs["v"].shape[3],
            tiles=tiles,
            **{name: address(x) for name, x in others.items()},
        )
        grid = self.problem.batch * like.shape[1] * fields.blocks if order is None else len(order)
        tensors = *self.inputs.values(), *self.results.values(), *others.values(), order, reach
        self.launcher.launch(variant, grid, params, self.shared.tensors(*tensors))
