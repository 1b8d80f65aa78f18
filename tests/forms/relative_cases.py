"""Biases of the form `relative` with free numbers, and their definition."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from biased_flash_attn import biased_flash_attn, biases
from biased_flash_attn.forms import Geometry

REFERENCE = functools.partial(biased_flash_attn, backend="reference")
TERMS = ("query", "key", "both")


def one_of(*options):
    """A choice determined by torch's seed, which Hypothesis strategies set."""
    return options[torch.randint(len(options), ())]


def drawn(
    geometry: Geometry,
    *,
    rank: int = 3,
    extent: int = 9,
    first: int = 0,
    terms: str = "both",
    beyond: str = "zero",
    heads: int = 2,
    batch: int = 2,
    dtype: torch.dtype = torch.float64,
) -> biases.RelativeBias:
    """A bias whose tensors are leaves, with n = extent - first distances."""
    n, given = extent - first, {}
    for side, rows in (("query", geometry.query_rows), ("key", geometry.key_rows)):
        if terms in (side, "both"):
            own = heads if side == "query" or terms == "key" else one_of(1, heads)
            given[f"{side}_factors"] = torch.randn(batch, own, rows, rank)
            given[f"{side}_tables"] = torch.randn(one_of(1, heads), rank, n)
    given = {name: x.to(dtype).requires_grad_() for name, x in given.items()}
    return biases.RelativeBias(**given, first=first, beyond=beyond)


def leaves(bias: biases.RelativeBias) -> dict[str, Tensor]:
    names = ("query_factors", "query_tables", "key_factors", "key_tables")
    given = {name: getattr(bias, name) for name in names}
    return {name: x for name, x in given.items() if x is not None}


def by_definition(bias: biases.RelativeBias, n_query: int, n_key: int) -> Tensor:
    """The bias, one pair at a time, (B, H, n_query, n_key) float64."""
    rows = []
    for i, j in itertools.product(range(n_query), range(n_key)):
        column, total = i + n_key - n_query - j - bias.first, 0
        for factors, table, row in (
            (bias.query_factors, bias.query_tables, i),
            (bias.key_factors, bias.key_tables, j),
        ):
            if factors is None:
                continue
            n = table.shape[-1]
            if bias.beyond == "zero" and not 0 <= column < n:
                continue
            vector = table.double()[..., min(max(column, 0), n - 1)]
            total = total + (factors.double()[:, :, row] * vector).sum(-1)
        rows.append(total + torch.zeros(1, bias.num_heads).double())
    return torch.stack(torch.broadcast_tensors(*rows), -1).unflatten(-1, (n_query, n_key))
