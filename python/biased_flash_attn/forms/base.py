"""What a form is: all that is known of one way in which a bias depends on queries and keys.

Shapes: B batch, H heads; "B or 1" and "H or 1" broadcast. i is a query, j a key, p_i the position
of query i among the keys, d = p_i - j their distance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import sequences
from ..chunk_pairs import Pair
from ..geometry import Geometry
from .bounds import Mass, Side


class Layout(NamedTuple):
    """What a tensor of a form has to be: (B or 1, H or 1, *rows) of a dtype."""

    tensor: Tensor
    dtype: torch.dtype
    rows: tuple[int, ...]


class Form:
    """A form with the tensors of one bias. Subclasses are registered by name.

    The methods here are those of a form whose tensors are the same whatever queries and keys a call
    has. Forms with numbers for each distance, query or key define what differs for them.

    Attributes:
        name: what the operators and the kernels call it.
        tensor_names: what error messages call its tensors.
        per_token: whether it has numbers of keys, so that it is lowered over a call's own tokens,
            and `state` is kept for queries that come later or are elsewhere.
        of_rows: whether it has numbers of rows of q or k, which packed sequences share.
        of_pairs: whether it has numbers of pairs, so that it is lowered over a call's own queries
            and all keys.
        of_any_geometry: whether it has no numbers of distances, queries or keys.
        may_skip: whether it has a bound of what it leaves to distant keys.
    """

    name: str
    tensor_names: ClassVar[tuple[str, ...]] = ()
    per_token: ClassVar[bool] = False
    of_rows: ClassVar[bool] = False
    of_pairs: ClassVar[bool] = False
    of_any_geometry: ClassVar[bool] = False
    may_skip: ClassVar[bool] = True

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those it has, in the order in which `of_tensors` and the kernels take them."""
        raise NotImplementedError

    def with_tensors(self, tensors: Sequence[Tensor]) -> Form:
        """The same form with other tensors."""
        return of_tensors(self.name, tensors)

    def layouts(self, geometry: Geometry, real: torch.dtype) -> list[Layout]:
        """What its tensors have to be for the kernels; real is float64 or float32."""
        raise NotImplementedError

    def dense(self, geometry: Geometry) -> Tensor:
        """The bias of every visible pair; broadcasts to (B, H, n_query, n_key), float64."""
        raise NotImplementedError

    def accumulators(self, batch: int, sequences: int, heads: int) -> list[Tensor]:
        """Zeros to which a kernel adds gradients, apart for each head and, where these have numbers
        of their own, each batch entry or sequence; broadcasting is undone by `sum_to_size`."""
        return [x.new_zeros(batch, heads, *x.shape[2:]) for x in self.tensors]

    # Parts of a call.

    def of_heads(self, heads: Tensor | slice) -> Form:
        """That of some of the heads."""
        return self.with_tensors([x if x.shape[1] == 1 else x[:, heads] for x in self.tensors])

    def of_entry(self, b: int) -> Form:
        """That of one batch entry."""
        return self.with_tensors([x if len(x) == 1 else x[b : b + 1] for x in self.tensors])

    def of_sequence(self, rows: sequences.Sequence, whole: Geometry, own: Geometry) -> Form:
        """That of one of the sequences of a call, which alone has the geometry `own`."""
        return self.of_entry(rows.entry).within(whole, own)

    def within(self, whole: Geometry, own: Geometry) -> Form:
        """That of the same queries and keys, of a geometry whose distances are among `whole`'s."""
        return self

    # Skipping: `forms.bounds` and DESIGN.md, "Certified skipping".

    def decays(self, geometry: Geometry, log_tolerance: float) -> bool:
        """Whether it may leave out enough to look further; a guess that costs little."""
        return True

    def mass(self, side: Side, geometry: Geometry) -> Mass:
        """The bound of what the bias leaves to the keys on one side of the queries."""
        raise NotImplementedError

    def roundings(self) -> Tensor | float:
        """By how much kernels may be off beyond the rounding of logits, in units of 2^-23."""
        return 0.0

    # Tokens elsewhere: those in a cache, and those of other ranks.

    @property
    def state(self) -> Tensor | None:
        """What other calls' queries have to know of this one's keys, (B or 1, H or 1, n)."""
        return None

    def with_state(self, state: Tensor) -> Form:
        """The same, of other keys."""
        return self

    def continued(self, before: Tensor) -> Form:
        """The same tokens behind others, whose last state `before` broadcasts to that of these."""
        return self

    def of_tokens(self, tokens: slice, queries: slice) -> Form:
        """That of some tokens and queries of a call."""
        return self.of_queries(queries)

    def of_queries(self, queries: slice) -> Form:
        """That of some of the queries."""
        return self

    def of_keys(self, keys: slice) -> Form:
        """That of some of the keys."""
        return self

    def peaks(self, block: int) -> Tensor | None:
        """The largest numbers of each `block` distances, if it has numbers of distances."""
        return None

    def of_pair(self, pair: Pair, states: tuple[Tensor, Tensor] | None) -> Form:
        """That of the queries of one chunk and the keys of one; it is lowered for the whole
        sequence or, per token, for the queries. states: those of these queries and keys."""
        raise NotImplementedError

    def mass_of_pair(self, pair: Pair, side: Side, known: Known | None) -> Mass:
        """The bound for the keys of another chunk, of which little is known."""
        raise NotImplementedError


class Known(NamedTuple):
    """What is known, of a form with a state, of two chunks: the state at the queries, and the
    lowest and highest among the keys before each cut, (.., T + 1)."""

    at_query: Tensor
    lowest: Tensor
    highest: Tensor


_MAKERS: dict[str, Callable[[Sequence[Tensor]], Form]] = {}


def register(name: str, make: Callable[[Sequence[Tensor]], Form]) -> None:
    """make rebuilds a form of this name from its tensors."""
    _MAKERS[name] = make


def of_tensors(name: str, tensors: Sequence[Tensor]) -> Form:
    """The form of this name, given its tensors."""
    return _MAKERS[name](tensors)


def names() -> list[str]:
    """Those of all forms."""
    return list(_MAKERS)
