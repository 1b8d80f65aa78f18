"""The forms that `check` computes, one entry for each.

Everything else in `check` treats all forms alike.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from ... import biases
from .checked_form import (
    KEYS,
    QUERIES,
    TOKENS,
    CheckedForm,
    Numbers,
    Tensors,
    columns_of_rows,
    distances,
)


class NoBias(CheckedForm):
    name = "none"


class Linear(CheckedForm):
    """b = -slope |d|: ALiBi with trained slopes (H,)."""

    name = "linear"

    def draw(self, numbers: Numbers) -> Tensors:
        return {"slopes": numbers.falling(4) * (1 + 0.1 * numbers.normal(numbers.heads))}

    def bias(self, tensors: Tensors) -> biases.ALiBi:
        bias = biases.ALiBi(len(tensors["slopes"]), trainable=True)
        bias.slopes = tensors["slopes"]
        return bias

    def pairs(self, tensors: Tensors, p: Tensor, j: Tensor) -> Tensor:
        return -(tensors["slopes"].double()[None, :, None, None] * distances(p, j).abs())


class Distance(CheckedForm):
    """b = table[d], (H, 2 reach + 1). Numbers differ at all signed distances to reveal shifts."""

    name = "distance"

    def draw(self, numbers: Numbers) -> Tensors:
        d = torch.arange(1 - numbers.length, numbers.length)
        noise = numbers.normal(numbers.heads, len(d))
        return {"table": -torch.log1p(d.abs()) + 0.3 * noise}

    def bias(self, tensors: Tensors) -> Table:
        return Table(tensors["table"])

    def pairs(self, tensors: Tensors, p: Tensor, j: Tensor) -> Tensor:
        table = tensors["table"].double()
        return table[None, :, distances(p, j) + table.shape[1] // 2]


class Table(biases.DistanceBias):
    """The bias of `Distance`."""

    def __init__(self, table: nn.Parameter):
        super().__init__(len(table))
        self.reach = table.shape[1] // 2
        self.table = table

    def formula(self, d: Tensor) -> Tensor:
        return self.table.double()[:, d.long() + self.reach]


class Cumulative(CheckedForm):
    """b = beta, the sum of the steps (B, H, N) between query and key."""

    name = "cumulative"
    axes: ClassVar = {"steps": (TOKENS,)}

    def draw(self, numbers: Numbers) -> Tensors:
        return {"steps": -numbers.falling(10)[:, None] * softplus(numbers.normal(*numbers.rows))}

    def bias(self, tensors: Tensors) -> biases.CumulativeBias:
        return biases.CumulativeBias(**tensors)

    def pairs(self, tensors: Tensors, p: Tensor, j: Tensor) -> Tensor:
        sums = tensors["steps"].double().cumsum(-1)
        beta = sums[..., p, None] - sums[..., None, j]
        return torch.where(distances(p, j) >= 0, beta, -beta)


class CumulativeWithGain(Cumulative):
    """b = gain beta, with gains (B, H, N) of the queries."""

    name = "cumulative with gain"
    axes: ClassVar = {**Cumulative.axes, "gain": (QUERIES,)}

    def draw(self, numbers: Numbers) -> Tensors:
        return super().draw(numbers) | {"gain": softplus(numbers.normal(*numbers.rows))}

    def pairs(self, tensors: Tensors, p: Tensor, j: Tensor) -> Tensor:
        return tensors["gain"].double()[..., None] * super().pairs(tensors, p, j)


class Log1pSquare(CumulativeWithGain):
    """b = -log(1 + (gain beta)^2)."""

    name = "log1p_square"

    def bias(self, tensors: Tensors) -> biases.CumulativeBias:
        return biases.CumulativeBias(**tensors, kernel="log1p_square")

    def pairs(self, tensors: Tensors, p: Tensor, j: Tensor) -> Tensor:
        return -torch.log1p(super().pairs(tensors, p, j).square())


class Dense(CheckedForm):
    """b = values[i, j], (B, H, N, N). Not timed, as no alternative avoids to read all values."""

    name = "dense"
    axes: ClassVar = {"values": (QUERIES, KEYS)}
    has_dtype_of_q = True
    longest = 1024  # as the values, their gradients and float64 copies take memory of N^2
    timed = False

    def draw(self, numbers: Numbers) -> Tensors:
        return {"values": numbers.rounded(numbers.normal(*numbers.rows, numbers.rows[2]))}

    def bias(self, tensors: Tensors) -> biases.DenseBias:
        return biases.DenseBias(tensors["values"])

    def pairs(self, tensors: Tensors, p: Tensor, j: Tensor) -> Tensor:
        return tensors["values"].double()


class Normalized(CheckedForm):
    """b = MLP(psi(|d|) / psi(max(L, p))): FIRE, with the parameters of its module."""

    name = "normalized"
    init_length = 512.0
    mlp = "mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias"
    rounding = 2**-21  # several roundings of arguments of the MLP, which are at most 1
    # Pairs take memory for each hidden unit. The terms of many queries would also cancel in the
    # gradients of single numbers, whose errors are judged relative to the sums of blocks.
    block = 32

    def draw(self, numbers: Numbers) -> Tensors:
        width = biases.FIRE(numbers.heads).mlp[0].out_features
        # The pieces of the MLP end at random fractions of the longest distance.
        slope, ends = numbers.normal(width, 1), numbers.uniform(width)
        return {
            "c": 0.1 * (1 + numbers.uniform()),
            "L_multiplier": torch.tensor(numbers.length / (2 * self.init_length)),
            "mlp.0.weight": slope,
            "mlp.0.bias": -slope[:, 0] * ends,
            "mlp.2.weight": numbers.normal(numbers.heads, width) / 2,
            "mlp.2.bias": numbers.normal(numbers.heads),
        }

    def bias(self, tensors: Tensors) -> biases.FIRE:
        fire = biases.FIRE(len(tensors["mlp.2.bias"]), init_length=self.init_length)
        fire = fire.to(tensors["c"].device)
        for name, x in tensors.items():
            module, _, parameter = name.rpartition(".")
            setattr(fire.get_submodule(module), parameter, x)
        return fire

    def pairs(self, tensors: Tensors, p: Tensor, j: Tensor) -> Tensor:
        slope, offset, weight, bias = (tensors[name].double() for name in self.mlp)
        x = self.psi(tensors, distances(p, j).abs()) / self.normalizers(tensors, p)
        hidden = torch.relu(x[..., None] * slope[:, 0] + offset)
        return (hidden @ weight.mT + bias).permute(2, 0, 1)[None]

    def is_smooth(self, tensors: Tensors, p: Tensor) -> Tensor:
        slope, offset, *_ = (tensors[name].double() for name in self.mlp)
        knots, normalizers = -offset / slope[:, 0], self.normalizers(tensors, p)
        nearest = (torch.expm1(knots * normalizers) / tensors["c"].double()).round()
        x = self.psi(tensors, nearest) / normalizers
        return ((x - knots).abs() > self.rounding).all(1)

    def psi(self, tensors: Tensors, x: Tensor) -> Tensor:
        return torch.log1p(tensors["c"].double().abs() * x)

    def normalizers(self, tensors: Tensors, p: Tensor) -> Tensor:
        """(queries, 1)"""
        length = (tensors["L_multiplier"].double() * self.init_length).abs()
        return (self.psi(tensors, torch.maximum(p, length)) + 1e-6)[:, None]  # as in the paper


class Relative(CheckedForm):
    """b = U[i] . P[d] within a band of distances, as BandedRelative has it."""

    name = "relative"
    axes: ClassVar = {"query_factors": (QUERIES,)}
    has_dtype_of_q = True

    def draw(self, numbers: Numbers) -> Tensors:
        rank, extent = 16, min(1024, numbers.length // 2)
        return {
            "query_factors": numbers.rounded(numbers.normal(*numbers.rows, rank)),
            "query_tables": numbers.rounded(numbers.normal(1, 1, extent, rank) / 4),
        }

    def bias(self, tensors: Tensors) -> biases.RelativeBias:
        u, p = tensors.values()
        return biases.RelativeBias(u, p[0].mT)

    def pairs(self, tensors: Tensors, p: Tensor, j: Tensor) -> Tensor:
        u, table = (x.double() for x in tensors.values())
        d = distances(p, j)
        column = d.clamp(0, table.shape[2] - 1)
        return torch.where(d == column, columns_of_rows(u @ table.mT, column), 0)


class RelativeLast(CheckedForm):
    """b = U[i] . P[d] + W[j] . Q[d], with the nearest d of the tables, as Disentangled has it."""

    name = "relative_last"
    axes: ClassVar = {"query_factors": (QUERIES,), "key_factors": (TOKENS,)}
    has_dtype_of_q = True

    def draw(self, numbers: Numbers) -> Tensors:
        rank, reach = 64, min(512, numbers.length // 4)
        tensors = {}
        for side in ("query", "key"):
            factors = numbers.normal(*numbers.rows, rank)
            tables = numbers.normal(1, numbers.heads, 2 * reach + 1, rank) / 8
            tensors[f"{side}_factors"] = numbers.rounded(factors)
            tensors[f"{side}_tables"] = numbers.rounded(tables)
        return tensors

    def bias(self, tensors: Tensors) -> biases.RelativeBias:
        u, p, w, q = tensors.values()
        reach = p.shape[2] // 2
        return biases.RelativeBias(u, p[0].mT, w, q[0].mT, first=-reach, beyond="last")

    def pairs(self, tensors: Tensors, p: Tensor, j: Tensor) -> Tensor:
        u, query_table, w, key_table = (x.double() for x in tensors.values())
        reach = query_table.shape[2] // 2
        column = distances(p, j).clamp(-reach, reach) + reach
        by_query = columns_of_rows(u @ query_table.mT, column)
        return by_query + columns_of_rows(w[:, :, j] @ key_table.mT, column.mT).mT


FORMS = {
    form.name: form
    for form in (
        NoBias(),
        Linear(),
        Distance(),
        Cumulative(),
        CumulativeWithGain(),
        Log1pSquare(),
        Normalized(),
        Relative(),
        RelativeLast(),
        Dense(),
    )
}
TIMED = tuple(name for name, form in FORMS.items() if form.timed)
# The form that represents all others where there is time for only one.
EXAMPLE = Linear.name
