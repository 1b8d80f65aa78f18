"""What a form adds whose queries see keys of other calls: those in a cache, or those of other
ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from .base import Form
from .chunk_pairs import Pair


class SharedForm(Form):
    """A form of which calls have parts: some of the queries and keys of a sequence.

    Attributes:
        per_token: whether it has values per key and no others. It is then lowered over a call's own
            tokens, and `state` is stored for queries of later calls or other ranks.
        per_pair: whether it has values per pair, or per query and per key. It is then lowered over
            a call's own queries and all keys; in decoding, if it has a `state`, over the new keys.
        fits_any_geometry: whether it has no values per distance, query or key.
    """

    per_token: ClassVar[bool] = False
    per_pair: ClassVar[bool] = False
    fits_any_geometry: ClassVar[bool] = False

    @property
    def spans_sequence(self) -> bool:
        """Whether a rank that has a part of a sequence lowers it for all positions."""
        return not (self.per_token or self.per_pair or self.fits_any_geometry)

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


class DecodableForm(SharedForm):
    """A form for queries that see the keys of a cache."""

    def for_tokens(self, tokens: slice, queries: slice) -> Form:
        """The form of some tokens and queries of a call."""
        return self.for_queries(queries)

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """The tensors whose last dimension is that of distances."""
        return ()

    def with_tables(self, tables: Sequence[Tensor]) -> Form:
        """The form with tables of other distances."""
        return self

    def extremes(self, block: int) -> tuple[Tensor | None, Tensor | None]:
        """The minima and maxima, or largest norms, that decoding needs over blocks of `block`
        distances of the tables."""
        return None, None


class DistributableForm(SharedForm):
    """A form for queries that see the keys of other ranks."""

    @abstractmethod
    def for_pair(self, pair: Pair, states: tuple[Tensor, Tensor] | None) -> Form:
        """The form of the queries of one chunk and the keys of another. This form is lowered for
        the whole sequence or, if per_token, for the queries. states: of these queries and keys."""
