"""What the kernels are given of each form, and how its gradients come from what they return.

What a form adds to a tile is in bias/tile.py, and in attention/backward_table.py the gradient of a
table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.language import constexpr

from ... import problem as calls
from ...forms import Form
from ...sequences import Sequences
from ..operands import Bias, padded_table, per_head, rows
from ..primitives import LOG2E


@dataclass(frozen=True)
class Gathered:
    """What the backward kernels return, (B, H, n) float32: gradients of the gains of queries, or of
    pairs (B, H, Nq, Nk); of the sums at the queries; and of those at the keys. table computes the
    gradient of a distance table."""

    problem: calls.Problem
    of_gain: Tensor
    of_queries: Tensor
    of_keys: Tensor
    table: Callable[[], Tensor]


@dataclass(frozen=True)
class Kernels:
    """How kernels compute a form.

    form: what they call it; squared: they compute -log(1 + beta^2) of it.
    may_be_factored: whether whole tiles of so many queries can take it from products of factors
        (bias/factors.py), given its tensors.
    has_gain, has_sums: whether the backward kernels gather gradients of gains and of sums for it.
    has_pairs: whether they write those of pairs in the place of those of gains.
    operands: the fields of Bias that its tensors become.
    gradients: those of its tensors, before broadcasting is undone.
    """

    form: str
    operands: Callable[..., dict]
    gradients: Callable[[Gathered], list[Tensor]]
    squared: bool = False
    may_be_factored: Callable[..., bool] = lambda block_m, *tensors: True
    has_gain: bool = False
    has_sums: bool = False
    has_pairs: bool = False

    def bias(self, tensors: tuple[Tensor, ...]) -> Bias:
        """Without factors."""
        operands = {"terms": None, "gain": None, **self.operands(*tensors)}
        return Bias(*self._flags(), **{name: per_head(x) for name, x in operands.items()})

    def bias_of_pages(self, form: Form) -> Bias:
        """That of decoding, where numbers of keys are in pages."""
        terms, gain = (*form.tensors, None, None)[:2]
        terms = rows(terms) if form.per_token else per_head(terms)
        return Bias(*self._flags(), terms, per_head(gain))

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
    return [-_sum_of_rows(gathered.of_gain, slopes.shape[0], gathered.problem.sequences)]


def _sums_gradients(gathered: Gathered) -> list[Tensor]:
    sequences = gathered.problem.sequences
    of_sums = _sums_gradient(gathered.of_queries, gathered.of_keys, sequences)
    return [of_sums, gathered.of_gain][: len(gathered.problem.form.tensors)]


# The form whose configurations suit a kernel that computes the bias of each pair by itself.
ONE_BY_ONE = "log1p_square"
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
        lambda gathered: [gathered.of_gain],
        may_be_factored=_never,
        has_gain=True,
        has_pairs=True,
    ),
}


def kernels_of(problem: calls.Problem) -> Kernels:
    """Those of the problem's form."""
    return FORMS[problem.form.name]


def _sum_of_rows(x: Tensor, entries: int, sequences: Sequences | None) -> Tensor:
    """(B, H, n) to (B, H) float64; packed, to those of each sequence where entries are many."""
    if sequences is None or not sequences.is_packed or entries == 1:
        return x.sum(-1, dtype=torch.float64)
    each = x.split(sequences.rows[:, 1].tolist(), -1)
    return torch.cat([one.sum(-1, dtype=torch.float64) for one in each])


def _sums_gradient(of_queries: Tensor, of_keys: Tensor, sequences: Sequences | None) -> Tensor:
    """(B, H, places) float64, of C[p] of each query and C[j] of each key."""
    gradient = of_keys.double()
    if sequences is not None and (sequences.is_packed or sequences.longest_shift):
        # Each place has at most one query, and queries before the first key have one at the end.
        room = torch.nn.functional.pad(gradient, (0, sequences.places + 1 - gradient.shape[-1]))
        place = sequences.keys_of_queries().unsqueeze(-2).expand(of_queries.shape)
        return room.scatter_add_(-1, place, of_queries.double())[..., :-1]
    shown = min(of_queries.shape[2], of_keys.shape[2])
    gradient[..., of_keys.shape[2] - shown :] += of_queries[..., of_queries.shape[2] - shown :]
    return gradient
