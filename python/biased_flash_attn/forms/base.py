"""The interface of a form, which describes one way in which a bias depends on queries and keys.

B is the batch size and H the number of heads; "B or 1" and "H or 1" broadcast. i is a query, j a
key, p_i the position of query i among the keys, and d = p_i - j their distance.
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
from .chunk_pairs import Pair
from .gradients import OWN
from .tail_mass import KeySide, TailMass


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
        per_token: whether it has values per key and no others. It is then lowered over a call's own
            tokens, and `state` is stored for queries of later calls or other ranks.
        of_rows: whether it has values per row of q or k, which packed sequences share.
        of_pairs: whether it has values per pair, or per query and per key. It is then lowered over
            a call's own queries and all keys; in decoding, if it has a `state`, over the new keys.
        of_any_geometry: whether it has no values per distance, query or key.
        may_skip: whether it is a `SkippableForm`.
        refuses_infinity: whether +infinity in its tensors is an error, as NaN is.
    """

    name: str
    tensor_names: ClassVar[tuple[str, ...]] = ()
    per_token: ClassVar[bool] = False
    of_rows: ClassVar[bool] = False
    of_pairs: ClassVar[bool] = False
    of_any_geometry: ClassVar[bool] = False
    may_skip: ClassVar[bool] = False
    refuses_infinity: ClassVar[bool] = False

    @property
    def of_whole_sequence(self) -> bool:
        """Whether a rank that has a part of a sequence lowers it for all positions."""
        return not (self.per_token or self.of_pairs or self.of_any_geometry)

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the form, in the order that `of_tensors` and the kernels expect."""

    def with_tensors(self, tensors: Sequence[Tensor]) -> Form:
        """A form of the same name with other tensors."""
        return of_tensors(self.name, tensors)

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """The tensors whose last dimension is that of distances."""
        return ()

    def with_tables(self, tables: Sequence[Tensor]) -> Form:
        """The form with tables of other distances."""
        return self

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

    def of_heads(self, heads: Tensor | slice) -> Form:
        """The form of some of the heads."""
        return self.with_tensors([x if x.shape[1] == 1 else x[:, heads] for x in self.tensors])

    def of_entry(self, b: int) -> Form:
        """The form of one batch entry."""
        return self.with_tensors([x if len(x) == 1 else x[b : b + 1] for x in self.tensors])

    def of_sequence(self, rows: sequences.Sequence, whole: Geometry, own: Geometry) -> Form:
        """The form of one sequence of a call, whose geometry by itself is `own`."""
        return self.of_entry(rows.entry).within(whole, own)

    def within(self, whole: Geometry, own: Geometry) -> Form:
        """The form for the geometry `own`, whose distances are a subset of those of `whole`."""
        return self

    # Tokens of other calls: those in a cache, and those of other ranks.

    @property
    def state(self) -> Tensor | None:
        """The values of this call's keys that queries of other calls need: numbers (B or 1, H or 1,
        n) or vectors (B or 1, H or 1, n, channels)."""
        return None

    def with_state(self, state: Tensor) -> Form:
        """The form with the state of other keys."""
        return self

    def continued(self, before: Tensor) -> Form:
        """The form of the same tokens after earlier ones, whose last state is `before`; it
        broadcasts to the state of these tokens."""
        return self

    def of_tokens(self, tokens: slice, queries: slice) -> Form:
        """The form of some tokens and queries of a call."""
        return self.of_queries(queries)

    def of_queries(self, queries: slice) -> Form:
        """The form of some of the queries."""
        return self

    def of_keys(self, keys: slice) -> Form:
        """The form of some of the keys."""
        return self

    def extremes(self, block: int) -> tuple[Tensor | None, Tensor | None]:
        """The minima and maxima, or largest norms, that decoding needs over blocks of `block`
        distances of the tables."""
        return None, None

    @abstractmethod
    def of_pair(self, pair: Pair, states: tuple[Tensor, Tensor] | None) -> Form:
        """The form of the queries of one chunk and the keys of another. This form is lowered for
        the whole sequence or, if per_token, for the queries. states: of these queries and keys."""


class SkippableForm(Form):
    """A form that bounds the softmax mass of distant keys (DESIGN.md, "Certified skipping")."""

    may_skip = True

    def decays(self, geometry: Geometry, log_tolerance: float) -> bool:
        """Whether skipping may save enough to make a plan; a fast heuristic."""
        return True

    @abstractmethod
    def mass(self, side: KeySide, geometry: Geometry) -> TailMass:
        """The bound of the bias's contribution to the softmax mass on one side of the queries."""

    def roundings(self) -> Tensor | float:
        """A bound of kernel errors in addition to the rounding of logits, in units of 2^-23."""
        return 0.0

    @abstractmethod
    def mass_of_pair(self, pair: Pair, side: KeySide, bounds: StateBounds | None) -> TailMass:
        """The bound for the keys of another chunk, from the bounds of their states."""


class StateBounds(NamedTuple):
    """The state at the queries of a chunk, and the smallest and largest state of the keys of
    another chunk before each cut, (..., T + 1)."""

    at_query: Tensor
    lowest: Tensor
    highest: Tensor


_MAKERS: dict[str, Callable[[Sequence[Tensor]], Form]] = {}


def register(name: str, make: Callable[[Sequence[Tensor]], Form]) -> None:
    """Registers a form; make rebuilds it from its tensors."""
    _MAKERS[name] = make


def of_tensors(name: str, tensors: Sequence[Tensor]) -> Form:
    """The form of this name with these tensors."""
    return _MAKERS[name](tensors)


def names() -> list[str]:
    """The names of all forms."""
    return list(_MAKERS)
