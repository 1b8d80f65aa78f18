"""The mask of attention layers, in place of a dense one: which keys are tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ...sequences import Sequences


class Once:
    """A property that is computed at its first use. functools.cached_property, whose lock no
    compiler can enter, is otherwise the same."""

    def __init__(self, compute: Callable):
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str):
        self.name = name

    def __get__(self, instance, owner: type):
        value = instance.__dict__[self.name] = self.compute(instance)
        return value


STATIC_CACHE = "static caches are not supported; use a DynamicCache, which is the default"
_UNSUPPORTED = (
    "chunks, windows on both sides, custom mask functions and sequences packed by position_ids are"
    " not supported"
)


@dataclass(frozen=True, eq=False)
class TokenMask:
    """Which keys are tokens, and which of them the queries, the last positions, see.

    It is created once per forward pass, and its properties are computed once for all layers.
    """

    n_query: int
    n_key: int
    causal: bool
    window: int | None = None  # the number of keys that a query sees, including its own
    tokens: Tensor | None = None  # (B, n_key) bool, or None where all keys are
    packed: Packing | None = None  # of tokens that follow one another in a single batch entry

    # Models use it to recognize a dense mask.
    ndim = 2

    @property
    def shape(self) -> tuple[int, int]:
        """That of a mask of tokens, by which transformers learns the number of keys."""
        return (1 if self.tokens is None else self.tokens.shape[0]), self.n_key

    @staticmethod
    def from_keys(tokens: Tensor) -> TokenMask:
        """The mask of attention in both directions, from (B, N) bool."""
        n = tokens.shape[1]
        return TokenMask(n, n, causal=False, tokens=_unless_all(tokens))

    def to(self, device=None, **_) -> TokenMask:
        """The mask on another device; conversions to a dtype have no effect."""
        if self.tokens is None or device is None or isinstance(device, torch.dtype):
            return self
        return replace(self, tokens=self.tokens.to(device))

    @classmethod
    def __torch_function__(cls, *_):
        """Raises an error in layers that compute with the mask themselves."""
        raise NotImplementedError(
            "attention layers compute with the mask and do not select an implementation by name;"
            " pass the model to biased_flash_attn.integrations.transformers.accelerate"
        )

    def contiguous(self):
        """`generate` calls it for the precomputed masks of a static cache."""
        raise NotImplementedError(STATIC_CACHE)

    @Once
    def has_holes(self) -> bool:
        """Whether there is padding between the tokens of some sequence.

        Compiled code raises an error where it finds some.
        """
        if self.tokens is None or torch.compiler.is_compiling():
            return False
        starts = self.tokens.int().diff(dim=1) == 1
        return bool((starts.sum(1) + self.tokens[:, 0] > 1).any())

    @property
    def has_removable_padding(self) -> bool:
        """Whether `unpadded` has fewer tokens. Compiled code keeps padding, as its shapes cannot
        depend on the number of tokens."""
        return not (self.tokens is None or self.has_holes or torch.compiler.is_compiling())

    def sequences(self, *, of_one_input: bool) -> Sequences | None:
        """The sequences without holes, or None if each batch entry is one.

        Queries at the positions of padding keys are padding if they are of the same input.
        """
        if self.tokens is None:
            return None if self.packed is None else self.packed.sequences
        return self._padded if of_one_input else self._padded_keys

    @Once
    def _padded(self) -> Sequences:
        return Sequences.from_mask(self.tokens, self.n_query)

    @Once
    def _padded_keys(self) -> Sequences:
        rows = self._padded.rows.clone()
        rows[:, 0], rows[:, 1] = 0, self.n_query
        return replace(self._padded, rows=rows)

    @Once
    def packing(self) -> Packing:
        """Sequences with holes, packed without them: tokens only, but all queries if not causal.

        Causal queries are the last tokens, so packing preserves their positions among tokens.
        """
        queries = self.tokens.new_ones(len(self.tokens), self.n_query)
        if self.causal:
            queries = self.tokens[:, self.n_key - self.n_query :]
        return Packing.from_tokens(queries, self.tokens)

    @Once
    def unpadded(self) -> TokenMask:
        """The mask for tensors of the tokens alone, `packed.keys` of (B, n_key).

        It is for layers whose queries are all keys, and which treat each token by itself.
        """
        packing = Packing.from_tokens(self.tokens, self.tokens)
        n = len(packing.keys.index)
        return replace(self, n_query=n, n_key=n, tokens=None, packed=packing)


@dataclass(frozen=True, eq=False)
class Rows:
    """Selected rows of tensors (B, N, ...)."""

    index: Tensor  # (rows,) int64, below B * N
    shape: tuple[int, int]

    @staticmethod
    def selected_by(kept: Tensor) -> Rows:
        """The rows of (B, N) bool that are true."""
        return Rows(kept.flatten().nonzero().squeeze(1), tuple(kept.shape))

    def pack(self, x: Tensor) -> Tensor:
        """(B, N, ...) to (1, rows, ...)."""
        return x.flatten(0, 1)[self.index][None]

    def unpack(self, x: Tensor, padding: float = 0.0) -> Tensor:
        """(1, rows, ...) to (B, N, ...), which is `padding` in other rows."""
        padded = x.new_full((math.prod(self.shape), *x.shape[2:]), padding)
        return padded.index_copy(0, self.index, x[0]).unflatten(0, self.shape)


@dataclass(frozen=True, eq=False)
class Packing:
    """The selected queries and keys, and the sequences among them."""

    queries: Rows
    keys: Rows
    sequences: Sequences

    @staticmethod
    def from_tokens(queries: Tensor, keys: Tensor) -> Packing:
        """The packing of the selected queries and keys, (B, N) bool each."""
        offsets = [
            torch.nn.functional.pad(x.sum(1).cumsum(0), (1, 0)).int() for x in (queries, keys)
        ]
        rows = [Rows.selected_by(x) for x in (queries, keys)]
        totals = tuple(len(x.index) for x in rows)
        return Packing(*rows, Sequences.from_offsets(*offsets, totals, (None, None)))


def create_token_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function=causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_,
) -> TokenMask:
    """The `AttentionMaskInterface` of this package; transformers documents the arguments.

    Raises NotImplementedError for masks that are not causal, sliding or bidirectional, and for
    caches with unused entries after the tokens.
    """
    if isinstance(attention_mask, TokenMask) and attention_mask.packed is not None:
        return attention_mask
    q_offset = int(q_offset)
    causal = mask_function is not bidirectional_mask_function
    window = local_size if causal else None
    n_tokens = q_offset + q_length if causal else kv_length
    if kv_offset + kv_length > n_tokens:
        raise NotImplementedError(
            f"there are {kv_length} keys for {n_tokens - kv_offset} tokens; {STATIC_CACHE}, and an"
            " attention_mask has as many columns as there are tokens"
        )
    tokens = _tokens(attention_mask, (batch_size, n_tokens), kv_offset)
    if use_vmap:
        raise NotImplementedError(f"the attention mask has a custom function; {_UNSUPPORTED}")
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        positions = torch.arange(q_offset, n_tokens, device=device)
        _check_function(mask_function, window, batch_size, positions)
    return TokenMask(q_length, kv_length, causal, window, tokens)


def _tokens(
    attention_mask: Tensor | TokenMask | None, shape: tuple[int, int], dropped: int
) -> Tensor | None:
    """Which keys are tokens, excluding those dropped by a sliding cache; None for all."""
    if attention_mask is None:
        return None
    if isinstance(attention_mask, TokenMask):  # `generate` precomputes it for a static cache
        raise NotImplementedError(STATIC_CACHE)
    if attention_mask.shape != shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; it must be (batch, tokens),"
            f" {shape} with all tokens of cache and input"
        )
    return _unless_all(attention_mask[:, dropped:].bool())


def _unless_all(tokens: Tensor) -> Tensor | None:
    """None where all keys are tokens, as far as values can be read."""
    if torch.compiler.is_compiling() or not tokens.all():
        return tokens
    return None


def _check_function(mask_function, window: int | None, batch_size: int, query: Tensor) -> None:
    """Checks that each query sees the first and last of its keys and neither neighbour.

    A mask function can only be evaluated. Chunks and packed sequences fail at the first key. While
    compiling, transformers passes a function of packed sequences whether there are any or not;
    compiled code evaluates it.
    """
    batch = torch.arange(batch_size, device=query.device)[:, None]
    head = torch.zeros((), dtype=torch.int64, device=query.device)

    def sees(key: Tensor) -> Tensor:
        return mask_function(batch, head, query, key)

    first = torch.zeros_like(query) if window is None else (query - window + 1).clamp(min=0)
    before = (first - 1).clamp(min=0)
    after = torch.minimum(query + 1, query[-1])
    is_window = (
        sees(query).all()
        & sees(first).all()
        & ~(sees(before) & (first > 0)).any()
        & ~(sees(after) & (after > query)).any()
    )
    found = "the attention mask is neither causal, sliding nor bidirectional"
    if window is not None:
        found = f"a mask of size {window} is not the window of the last {window} keys"
    if torch.compiler.is_compiling():
        torch._assert_async(is_window, f"{found}; {_UNSUPPORTED}")
    elif not is_window:
        raise NotImplementedError(f"{found}; {_UNSUPPORTED}")
