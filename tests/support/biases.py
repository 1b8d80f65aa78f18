"""Biases of every form, and all biases of the package, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from biased_flash_attn import biases
from biased_flash_attn.forms import Form, Geometry, Linear, Normalized
from tests.support.cases import Case


class FreeTable(biases.DistanceBias):
    """An independent number for each signed distance, so that a misplaced entry is noticed."""

    def __init__(self, num_heads: int, n_query: int, n_key: int, curves: int | None = None):
        super().__init__(num_heads)
        self.origin = n_query
        self.r = nn.Parameter(torch.randn(curves or num_heads, n_query + n_key + 2))

    def formula(self, d: Tensor) -> Tensor:
        table = self.r.double()[:, d.long() + self.origin]
        return table[0] if len(self.r) == 1 else table


def lines_through(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Knots, slopes and intercepts of the function of each head through the points (x, y[h])."""
    slopes = y.diff() / x.diff()
    return x[None, None, 1:-1], slopes[None], (y[:, :-1] - slopes * x[:-1])[None]


def _multiples(x: Tensor, unit: float) -> Tensor:
    return (x / unit).round() * unit


class FreePieces(nn.Module):
    """A table, gains and a function with 7 knots.

    Products of a gain and an entry of the table are multiples of 2^-12, and knots lie between
    them: the function's slope at a product is the same in any precision.
    """

    def __init__(self, case: Case, heads: int):
        super().__init__()
        self.num_heads = case.heads[0]
        self.origin = max(case.lengths)
        self.table = nn.Parameter(_multiples(torch.randn(heads, 2 * self.origin + 2), 2**-6))
        self.of_position = nn.Parameter(_multiples(torch.randn(heads, 2 * self.origin), 2**-6))
        self.values = nn.Parameter(torch.randn(self.num_heads, 9))
        ends = torch.linspace(-2, 2, 9) + 0.3 * torch.rand(9)
        self.register_buffer("ends", _multiples(ends, 2**-12) + 2**-13)

    def lower(self, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> Normalized:
        return self._form(geometry, geometry.row_positions(device), dtype)

    def dense(self, n_query: int, n_key: int, before: int = 0) -> Tensor:
        """The positions of queries do not count the first `before` keys."""
        geometry = Geometry(n_query, n_key, causal=False)
        form = self._form(geometry, geometry.row_positions() - before, torch.float64)
        return form.dense(geometry)

    def _form(self, geometry: Geometry, positions: Tensor, dtype: torch.dtype) -> Normalized:
        table = self.table[:, geometry.distances(positions.device).long() + self.origin]
        gain = self.of_position[:, positions.clamp(min=-self.origin)].transpose(0, 1)
        function = lines_through(self.ends.double(), self.values.double())
        return Normalized(*(x.to(dtype) for x in (table[None], gain, *function)))


class Content(nn.Module):
    """A module whose parameters determine a bias, which calling it returns."""


class FreeFactors(Content):
    """A vector per query, per key, or both, and one per distance, except for some distances.

    All numbers are multiples of 2^-4, exact in any dtype. Vectors of rows and of distances have
    opposite signs, so that no sum over r cancels.
    """

    def __init__(
        self,
        case: Case,
        *,
        of_queries: int = 0,
        of_keys: int = 0,
        beyond: str = "zero",
        distances: int | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        """dtype: that of the factors and tables, except in float64 copies of a problem."""
        super().__init__()
        self.dtype = dtype
        (n_query, n_key), heads = case.lengths, case.heads[0]
        self.beyond, n = beyond, distances or max(1, 2 * n_key // 3)
        self.first = 0 if case.causal else -(n // 3)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(_multiples(torch.randn(shape), 2**-4).abs())

        if of_queries:
            self.query_factors = drawn(case.batch, heads, n_query, of_queries)
            self.query_tables = nn.Parameter(-drawn(1, of_queries, n) / 4)
        if of_keys:
            self.key_factors = drawn(case.batch, 1 if of_queries else heads, n_key, of_keys)
            self.key_tables = nn.Parameter(-drawn(heads, of_keys, n) / 4)

    def forward(self) -> biases.RelativeBias:
        given = dict(self.named_parameters())
        if next(self.parameters()).dtype == torch.float32:
            given = {name: x.to(self.dtype) for name, x in given.items()}
        return biases.RelativeBias(**given, first=self.first, beyond=self.beyond)

    def keep_rows(self, entry: slice, length: int) -> None:
        """Keeps the first rows of one batch entry."""
        for name in ("query_factors", "key_factors"):
            if hasattr(self, name):
                rows = getattr(self, name)[entry, :, :length]
                setattr(self, name, nn.Parameter(rows.detach()))


def of_rows(
    bias: biases.RelativeBias,
    queries: slice = slice(None),
    keys: slice = slice(None),
    entries: slice = slice(None),
) -> biases.RelativeBias:
    """The bias of some queries and keys of some batch entries."""
    parts = {"query_factors": queries, "key_factors": keys}
    given = {name: getattr(bias, name) for name in parts}
    return replace(
        bias, **{k: None if x is None else x[entries, :, parts[k]] for k, x in given.items()}
    )


class SlopesOfSequences(nn.Module):
    """ALiBi with slopes for each sequence, which the form allows and no shipped bias uses."""

    def __init__(self, batch: int, num_heads: int):
        super().__init__()
        self.slopes = nn.Parameter(0.1 * torch.randn(batch, num_heads))

    def lower(self, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> Linear:
        return Linear(self.slopes.to(dtype))

    def dense(self, n_query: int, n_key: int) -> Tensor:
        return Linear(self.slopes).dense(Geometry(n_query, n_key, causal=False))


class Lowered:
    """A custom bias, of which only the form it is lowered to is known."""

    def __init__(self, bias):
        self.bias = bias

    def lower(self, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> Form:
        return self.bias.lower(geometry, dtype, device)


class Steps(Content):
    def __init__(self, steps: Tensor, gain: Tensor | None = None, kernel: str | None = None):
        super().__init__()
        self.steps = nn.Parameter(steps)
        self.gain = None if gain is None else nn.Parameter(gain)
        self.kernel = kernel

    def forward(self) -> biases.CumulativeBias:
        return biases.CumulativeBias(self.steps, self.gain, self.kernel)


class ContextBias(Content):
    def __init__(self, module: nn.Module, x: Tensor):
        super().__init__()
        self.module = module
        self.x = nn.Parameter(x)

    def forward(self) -> biases.CumulativeBias:
        return self.module(self.x)


def steps(kernel: str | None = None, *, gained: bool = False, shared: bool = False):
    """Steps of both signs, so that their sums are a random walk."""

    def make(case: Case) -> Steps:
        (n_query, n_key), (heads, _) = case.lengths, case.heads
        gain = torch.randn(case.batch, heads, n_query) if gained else None
        return Steps(0.3 * torch.randn(1 if shared else case.batch, heads, n_key), gain, kernel)

    return make


class Dense(Content):
    """An independent number for each pair."""

    def __init__(self, *shape: int):
        super().__init__()
        self.tensor = nn.Parameter(torch.randn(shape))

    def forward(self) -> biases.DenseBias:
        return biases.DenseBias(self.tensor)


# Each form, with unconstrained parameters.
FORMS: dict[str, Callable[[Case], nn.Module | None]] = {
    "none": lambda case: None,
    "linear": lambda case: biases.ALiBi(case.heads[0], trainable=True),
    "linear-batch": lambda case: SlopesOfSequences(case.batch, case.heads[0]),
    "distance": lambda case: FreeTable(case.heads[0], *case.lengths),
    "distance-shared": lambda case: FreeTable(case.heads[0], *case.lengths, curves=1),
    "cumulative": steps(),
    "cumulative-gain": steps(gained=True, shared=True),
    "log1p_square": steps("log1p_square", shared=True),
    "log1p_square-gain": steps("log1p_square", gained=True),
    "normalized": lambda case: FreePieces(case, 1),
    "normalized-heads": lambda case: FreePieces(case, case.heads[0]),
    "relative": lambda case: FreeFactors(case, of_queries=3, of_keys=5),
    "relative-keys": lambda case: FreeFactors(case, of_keys=16),
    "relative_last": lambda case: FreeFactors(case, of_queries=16, beyond="last"),
}
# Vectors of queries only, by rank.
OF_QUERIES = {
    f"{form}-rank{rank}": lambda case, rank=rank, beyond=beyond: FreeFactors(
        case, of_queries=rank, beyond=beyond
    )
    for form, beyond in (("relative", "zero"), ("relative_last", "last"))
    for rank in (1, 3, 16, 64)
}
# Vectors of queries and keys as wide as heads are.
WIDE = {
    f"{form}-both{rank}": lambda case, rank=rank, beyond=beyond: FreeFactors(
        case, of_queries=rank, of_keys=rank, beyond=beyond
    )
    for form, beyond in (("relative", "zero"), ("relative_last", "last"))
    for rank in (64, 128)
}
# The same in the dtype of the inputs, whose products have the arithmetic of that dtype.
SAME_DTYPE = {
    f"{form}-same-dtype{rank}": lambda case, rank=rank, beyond=beyond: FreeFactors(
        case, of_queries=rank, of_keys=rank, beyond=beyond, dtype=case.dtype
    )
    for form, beyond in (("relative", "zero"), ("relative_last", "last"))
    for rank in (3, 64)
}
# Dense forms; they are divided into parts differently: see tests/forms/test_dense.py.
DENSE = {
    "dense": lambda case: Dense(case.batch, case.heads[0], *case.lengths),
    "dense-heads": lambda case: Dense(case.heads[0], *case.lengths),
    "dense-keys": lambda case: Dense(case.batch, 1, 1, case.lengths[1]),
    "dense-shared": lambda case: Dense(*case.lengths),
}


def position_bias(make: type[nn.Module], **settings):
    return lambda case: make(case.heads[0], **settings)


def context_bias(make: type[nn.Module]):
    def make_with_states(case: Case) -> ContextBias:
        return ContextBias(make(5, case.heads[0]), torch.randn(case.batch, case.lengths[1], 5))

    return make_with_states


SHIPPED = {
    **{name: position_bias(make) for name, make in biases.POSITION_BIASES.items()},
    **{name: context_bias(make) for name, make in biases.CONTEXT_BIASES.items()},
    "sandwich-trained": position_bias(biases.Sandwich, trainable=True),
    "t5-both": position_bias(biases.T5, bidirectional=True),
}
