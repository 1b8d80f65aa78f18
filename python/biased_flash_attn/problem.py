"""The record that describes a call to a backend, from the public function to the kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .forms import Form, Geometry
from .sequences import Sequences, empty_rows


class TileBounds(NamedTuple):
    """Bounds per tile of the keys of a cache, for skipping (`decoding.key_bounds`); None if
    unknown.

    lowest, highest: the extremes of a form's state, or its largest norm.
    table_lowest, table_highest: the `Form.extremes` of a form's tables, over blocks of
    shared_constants.PEAK_DISTANCES distances, (B or 1, H or 1, blocks).
    """

    centres: Tensor | None = None
    extents: Tensor | None = None
    lowest: Tensor | None = None
    highest: Tensor | None = None
    table_lowest: Tensor | None = None
    table_highest: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Pages:
    """The location of the keys of a cache: key j of sequence b is row j % page_size of page
    block_table[b, j // page_size % columns].

    block_table: (B, columns) int32.
    lengths: the number of keys of each sequence, (B,) int64.
    """

    block_table: Tensor
    lengths: Tensor
    bounds: TileBounds = field(default_factory=TileBounds)


@dataclass(frozen=True, eq=False)
class Problem:
    """A call whose arguments have been validated and completed, and whose bias has been lowered.

    Attributes:
        q: (B, H, Nq, D), the last dimension contiguous.
        k: (B, Hkv, Nk, D); in decoding (pages, Hkv, page_size, D).
        v: (B, Hkv, Nk, Dv); in decoding (pages, Hkv, page_size, Dv).
        form: the form of the bias; in decoding, its state is stored in pages.
        geometry: the positions of queries and keys, and the sequences.
        scale: factor of q k^T.
        tolerance: the fraction of each query's softmax mass that may be skipped.
        backend: the name of the backend that computes the problem.
        plan: key ranges of the queries, (2, B, H, tiles) int32 (`skipping.plans`); None for all
            keys.
        pages: the location of the keys in decoding; None for an ordinary call.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    form: Form
    geometry: Geometry
    scale: float
    tolerance: float
    backend: str
    plan: Tensor | None = None
    pages: Pages | None = None

    @property
    def sequences(self) -> Sequences | None:
        return self.geometry.sequences

    @property
    def batch(self) -> int:
        """The number of sequences."""
        sequences = self.geometry.sequences
        return self.q.shape[0] if sequences is None else sequences.rows.shape[0]

    @property
    def is_empty(self) -> bool:
        """Whether no query sees any key because there are no sequences, queries or keys."""
        return 0 in (self.batch, self.geometry.n_query, self.geometry.n_key)

    @property
    def real(self) -> torch.dtype:
        """The dtype of lse and of a form's tensors: float64 for float64 inputs, else float32."""
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def needs_gradients(self) -> bool:
        """Whether autograd records the call."""
        return need_gradients(self.tensors())

    def empty_results(self) -> tuple[Tensor, Tensor]:
        """Returns o and lse for kernels to write, with the values of padding rows, which they do
        not write."""
        o = empty_rows(self.q, self.v.shape[3])
        lse = self.q.new_empty(self.q.shape[:3], dtype=self.real)
        if self.sequences is not None:
            o.zero_(), lse.fill_(-torch.inf)
        return o, lse

    def empty_forward_results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same, and pivot and log_sum, whose sum is lse in base 2. Subtracting the pivot from
        logits near it is exact, however large both are."""
        o, lse = self.empty_results()
        like_lse = torch.empty_like if self.sequences is None else torch.clone
        return o, lse, like_lse(lse), like_lse(lse)

    def empty_gradients(self) -> list[Tensor]:
        """Returns the gradients of q, k and v for kernels to write, 0 in padding rows."""
        gradients = [empty_rows(x, x.shape[3]) for x in (self.q, self.k, self.v)]
        if self.sequences is not None:
            for x in gradients:
                x.zero_()
        return gradients

    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, *self.form.tensors

    def detached(self) -> Problem:
        """Returns the problem with all tensors detached from the autograd graph."""
        q, k, v, *tensors = (x.detach() for x in self.tensors())
        return replace(self, q=q, k=k, v=v, form=self.form.with_tensors(tensors))

    def each_sequence(self) -> Iterator[Problem]:
        """Yields the problem of each sequence, with tensors of one batch entry."""
        whole = self.geometry
        for rows in whole.sequences:
            own = Geometry(rows.n_query, rows.n_key, whole.causal, whole.window, shift=rows.shift)
            yield replace(
                self,
                q=rows.queries(self.q),
                k=rows.keys(self.k),
                v=rows.keys(self.v),
                form=self.form.for_sequence(rows, whole, own),
                geometry=own,
            )

    def for_kv_heads(self, kv_heads: Tensor) -> Problem:
        """Returns the problem restricted to some key heads and the query heads that share them."""
        group = self.q.shape[1] // self.k.shape[1]
        heads = (kv_heads[:, None] * group + torch.arange(group, device=kv_heads.device)).flatten()
        return replace(
            self,
            q=self.q[:, heads],
            k=self.k[:, kv_heads],
            v=self.v[:, kv_heads],
            form=self.form.for_heads(heads),
        )

    def over_pages(self, k: Tensor, v: Tensor, form: Form, pages: Pages) -> Problem:
        """Returns the decoding problem of these queries, whose geometry covers as many keys as the
        block table."""
        most_keys = pages.block_table.shape[1] * k.shape[2]
        geometry = Geometry(self.q.shape[2], most_keys, True, self.geometry.window)
        settings = self.scale, self.tolerance, self.backend
        return Problem(self.q, k, v, form, geometry, *settings, pages=pages)


def need_gradients(tensors: Sequence[Tensor]) -> bool:
    """Whether autograd records an operation on tensors."""
    return torch.is_grad_enabled() and True in [x.requires_grad for x in tensors]
