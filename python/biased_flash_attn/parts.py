"""The sequences of a call one by one, where that is not a kernel's work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from .forms import Geometry


@dataclass(frozen=True, eq=False)
class Part:
    """What one of several sequences has of a call. Its tensors have one batch entry."""

    geometry: Geometry
    q: Tensor
    k: Tensor
    v: Tensor
    terms: Tensor | None
    gain: Tensor | None


def parts(
    geometry: Geometry,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Tensor | None,
    gain: Tensor | None,
    form: str,
) -> Iterator[Part]:
    """The sequences of a geometry that has some, one by one."""
    for b, rows in enumerate(geometry.sequences.rows.tolist()):
        first_query, n_query, first_key, n_key, shift = rows
        own = Geometry(n_query, n_key, geometry.causal, geometry.window, shift=shift)
        of_queries = slice(first_query, first_query + n_query)
        of_keys = slice(first_key, first_key + n_key)
        if form == "distance":
            first_term = own.first_distance - geometry.first_distance
            of_terms = slice(first_term, first_term + own.n_distances)
        else:
            of_terms = slice(None) if form == "linear" else slice(first_key, first_key + own.places)
        yield Part(
            own,
            _entry(q, b)[:, :, of_queries],
            _entry(k, b)[:, :, of_keys],
            _entry(v, b)[:, :, of_keys],
            None if terms is None else _entry(terms, b)[..., of_terms],
            None if gain is None else _entry(gain, b)[..., of_queries],
        )


def _entry(x: Tensor, b: int) -> Tensor:
    return x if x.shape[0] == 1 else x[b : b + 1]
