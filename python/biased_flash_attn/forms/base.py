"""The interface of a form, which describes one way in which a bias depends on queries and keys.

This is what every form has; `skippable` and `other_tokens` have what a form may add. B is the batch
size and H the number of heads; "B or 1" and "H or 1" broadcast. i is a query, j a key, p_i the
position of query i among the keys, and d = p_i - j their distance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import sequences
from ..geometry import Geometry
from ..summary import ShownByShapes
from .gradients import OWN


class Layout(NamedTuple):
    """The required dtype and shape, (B or 1, H or 1, *rows), of a form's tensor."""

    tensor: Tensor
    dtype: torch.dtype
    rows: tuple[int, ...]


class Form(ShownByShapes, ABC):
    """A form with the tensors of one bias. Subclasses are registered by name.

    The default methods suit a form whose tensors do not depend on the queries and keys of a call.
    Forms with values per distance, query or key override them.

    Attributes:
        name: the name of the form in the operators and the kernels.
        tensor_names: the names of its tensors in error messages.
        per_row: whether it has values per row of q or k, which packed sequences share.
        refuses_infinity: whether +infinity in its tensors is an error, as NaN is.
        may_skip: whether it is a `SkippableForm`.
    """

    name: str
    tensor_names: ClassVar[tuple[str, ...]] = ()
    per_row: ClassVar[bool] = False
    refuses_infinity: ClassVar[bool] = False
    may_skip: ClassVar[bool] = False

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the form, in the order that `from_tensors` and the kernels expect."""

    def with_tensors(self, tensors: Sequence[Tensor]) -> Form:
        """A form of the same name with other tensors."""
        return from_tensors(self.name, tensors)

    @abstractmethod
    def layouts(self, geometry: Geometry, real: torch.dtype) -> list[Layout]:
        """The layouts of the tensors that the kernels require; real is float64 or float32."""

    @abstractmethod
    def dense(self, geometry: Geometry) -> Tensor:
        """The bias of every visible pair; broadcasts to (B, H, n_query, n_key), float64."""

    def accumulators(self, batch: int, sequences: int, heads: int) -> list[Tensor]:
        """Zeros to which a kernel adds the gradients of each head and, where these have separate
        values, of each batch entry or sequence. `sum_to_size` undoes broadcasting."""
        return [x.new_zeros(batch, heads, *x.shape[2:]) for x in self.tensors]

    def gradient_targets(self, q: Tensor, k: Tensor) -> list[int]:
        """Where the gradients of the tensors go, OWN, IN_Q or IN_K of `gradients`, in a call with
        these q and k."""
        return [OWN] * len(self.tensors)

    # Parts of a call.

    def for_heads(self, heads: Tensor | slice) -> Form:
        """The form of some of the heads."""
        return self.with_tensors([x if x.shape[1] == 1 else x[:, heads] for x in self.tensors])

    def for_entry(self, b: int) -> Form:
        """The form of one batch entry."""
        return self.with_tensors([x if len(x) == 1 else x[b : b + 1] for x in self.tensors])

    def for_sequence(self, rows: sequences.Sequence, whole: Geometry, own: Geometry) -> Form:
        """The form of one sequence of a call, whose geometry by itself is `own`."""
        return self.for_entry(rows.entry).within(whole, own)

    def for_queries(self, queries: slice) -> Form:
        """The form of some of the queries."""
        return self

    def for_keys(self, keys: slice) -> Form:
        """The form of some of the keys."""
        return self

    def within(self, whole: Geometry, own: Geometry) -> Form:
        """The form for the geometry `own`, whose distances are a subset of those of `whole`."""
        return self


_MAKERS: dict[str, Callable[[Sequence[Tensor]], Form]] = {}


def register(name: str, make: Callable[[Sequence[Tensor]], Form]) -> None:
    """Registers a form; make rebuilds it from its tensors."""
    _MAKERS[name] = make


def from_tensors(name: str, tensors: Sequence[Tensor]) -> Form:
    """The form of this name with these tensors."""
    return _MAKERS[name](tensors)


def names() -> list[str]:
    """The names of all forms."""
    return list(_MAKERS)
