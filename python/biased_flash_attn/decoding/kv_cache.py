"""The cache of decoding: keys, values, what biases know of them, and bounds for skipping."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import operators
from ..autocast import under_autocast
from ..validation import DTYPES, MAX_HEAD_DIM, as_int
from .block_table import BlockTable
from .key_bounds import KeyBounds

LEAST_PAGE_SIZE = 16


class KVCache:
    """The keys and values of a batch of sequences, to which tokens are appended.

    Sequences may differ in length. They are stored in pages of `page_size` keys, which a block
    table assigns to sequences as they grow. The pool of pages doubles when it is exhausted; with
    `pages` its size is fixed, and with `block_table` the caller also assigns the pages. The cache
    also stores what a bias has for each key (`Form.state`), so that nothing is recomputed for old
    tokens: the prefix sums of cumulative biases, and the key factors of a `RelativeBias`.

    Args:
        batch: the number of sequences.
        kv_heads: Hkv, the heads of k and v.
        head_dim: D, the channels of a key.
        value_dim: Dv, the channels of a value; D by default.
        dtype: of q, k and v; float64, float32, bfloat16 or float16. By default, that of autocast
            where it is on for the device, and PyTorch's default dtype otherwise.
        device: the device of q, k and v.
        window: if given, tokens attend to the last `window` keys, their own included, and the cache
            keeps no others: a sequence of any length takes constant memory (the sliding cache of
            Chi et al., "Dissecting Transformer Length Extrapolation", 2023, appendix B).
        page_size: keys per page, a power of two of at least 16.
        pages: the number of pages, if it is fixed.
        block_table: (batch, columns) int32, the pages that hold the keys of each sequence, or -1
            for none: key j is row j % page_size of page block_table[b, j // page_size], or with a
            window, of page block_table[b, j // page_size % columns]. It is copied.

    Raises:
        TypeError, ValueError: naming the argument, its value and the permitted values.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        window: int | None = None,
        page_size: int = 64,
        pages: int | None = None,
        block_table: Tensor | None = None,
    ):
        value_dim = head_dim if value_dim is None else value_dim
        window = as_int(window)
        for name, value in (("batch", batch), ("kv_heads", kv_heads), ("page_size", page_size)):
            _check_int(name, value, 1)
        for name, value in (("head_dim", head_dim), ("value_dim", value_dim)):
            _check_int(name, value, 1, MAX_HEAD_DIM)
        for name, value in (("window", window), ("pages", pages)):
            if value is not None:
                _check_int(name, value, 1)
        if page_size < LEAST_PAGE_SIZE or page_size & (page_size - 1):
            raise ValueError(
                f"page_size is {page_size}; it may be a power of two from {LEAST_PAGE_SIZE} on"
            )
        if dtype is None:
            dtype = under_autocast(torch.empty(0, device=device))[0].dtype
        if dtype not in DTYPES:
            raise TypeError(f"dtype is {dtype}; it may be float64, float32, bfloat16 or float16")
        if block_table is not None and pages is None:
            raise ValueError("block_table is given and pages is None; it must be their number")
        self.window = window
        self.lengths = [0] * batch
        self._written = [0] * batch  # ends of written keys, which may have overwritten older keys
        device = torch.empty(0, device=device).device
        self.table = BlockTable(batch, page_size, device, window, pages, block_table)
        # Tensors made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self.k = torch.empty(
                (self.table.pages, kv_heads, page_size, head_dim), dtype=dtype, device=device
            )
            self.v = self.k.new_empty((*self.k.shape[:3], value_dim))
            self.bounds = KeyBounds(self.table.pages, self.k, None)
        # A form's state at the keys, (pages, H or 1, page_size) or (pages, H or 1, page_size,
        # channels), and at the last keys, (batch, H or 1, 1) or (batch, H or 1, 1, channels).
        self.state: Tensor | None = None
        self.last_state: Tensor | None = None
        self.distance_tables = None  # the tables of a bias over distances: see `DistanceTables`
        self.checked: tuple[Tensor, ...] = ()  # tensors of a form that were checked

    def __repr__(self) -> str:
        pages, kv_heads, page_size, head_dim = self.k.shape
        return (
            f"KVCache(lengths={self.lengths}, kv_heads={kv_heads}, head_dim={head_dim},"
            f" dtype={self.k.dtype}, window={self.window}, pages={pages} of {page_size})"
        )

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def most_tokens(self) -> int | None:
        """The number of tokens that can be appended at once without overwriting a key that is
        visible to the first of them; None without a window."""
        return None if self.window is None else self.table.keys - self.window + 1

    def truncate(self, lengths: int | list[int] | Tensor) -> None:
        """Shortens the sequences to `lengths` keys, one number per sequence or one for all.

        This removes rejected tokens of speculative decoding, the padding of prompts of different
        lengths or, with 0, whole sequences, whose pages are then free.

        Raises TypeError or ValueError, and changes nothing, if a sequence has fewer keys, or if
        keys within its window have been overwritten.
        """
        lengths = self._checked_lengths(lengths)
        self.table.release(lengths)
        self.lengths = lengths
        self._written = [
            most if length else 0 for most, length in zip(self._written, lengths, strict=True)
        ]
        if not any(lengths):
            self.distance_tables = None
        if self.state is not None:
            self.last_state = self._state_at([length - 1 for length in lengths])

    def reserve(self, tokens: int) -> None:
        """Reserves pages for `tokens` more tokens of each sequence.

        Raises ValueError if the cache is full, or PyTorch's error if memory is exhausted; the cache
        is then unchanged.
        """
        missing = self.table.missing([length + tokens for length in self.lengths])
        if not any(missing):
            return
        pages = self.table.pages
        if sum(missing) > self.table.free:
            pages = max(2 * pages, pages + sum(missing) - self.table.free)
            self._grow(pages)
        self.table.assign(missing, pages)

    def lengths_with(self, tokens: int) -> Tensor:
        """Returns the lengths of the sequences with `tokens` more tokens each, (batch,) int64."""
        return torch.tensor([length + tokens for length in self.lengths], device=self.k.device)

    @torch.no_grad()
    def write(
        self, k: Tensor, v: Tensor, state: Tensor | None, lengths: Tensor, backend: str
    ) -> Tensor | None:
        """Writes tokens (B, Hkv, n, D or Dv) after the last key of each sequence. They become part
        of the sequence only with `advance`.

        state, (B, H or 1, n) or (B, H or 1, n, channels), is that of a form, continued from the
        first token of each sequence; lengths include the new tokens. Returns the state of the last
        tokens.
        """
        tokens = k.shape[2]
        if tokens == 0:
            return self.last_state
        if not any(self.lengths):
            self._begin_state(state)
        self._written = [
            max(most, length + tokens)
            for most, length in zip(self._written, self.lengths, strict=True)
        ]
        for pages, rows in ((self.k, k), (self.v, v), (self.state, state)):
            if rows is not None:
                operators.append(pages, rows, self.table.entries, lengths, backend)
        self._write_bounds(tokens)
        return None if state is None else state[:, :, -1:]

    def advance(self, tokens: int, last_state: Tensor | None) -> None:
        """Makes the tokens that were written part of the sequences."""
        self.lengths = [length + tokens for length in self.lengths]
        self.last_state = last_state

    def _grow(self, pages: int) -> None:
        with torch.inference_mode(False):
            k, v = _longer(self.k, pages), _longer(self.v, pages)
            state = None if self.state is None else _longer(self.state, pages)
            bounds = KeyBounds(pages, k, state)
            bounds.copy_from(self.bounds)
        self.k, self.v, self.state, self.bounds = k, v, state, bounds

    def _begin_state(self, like: Tensor | None) -> None:
        """Allocates pages in an empty cache for a state like (B, H or 1, n, ...), or removes them
        if None."""
        if layout_of(like) == layout_of(self.state):
            return
        pages, _, page_size, _ = self.k.shape
        state = None
        with torch.inference_mode(False):
            if like is not None:
                shape = (pages, like.shape[1], page_size, *like.shape[3:])
                state = self.k.new_empty(shape, dtype=like.dtype)
            bounds = KeyBounds(pages, self.k, state)
        self.state, self.bounds = state, bounds

    def _write_bounds(self, tokens: int) -> None:
        """Computes the bounds of the tiles that are completed by `tokens` new tokens."""
        size = self.bounds.tile_keys
        tiles = [
            (b, tile * size)
            for b, length in enumerate(self.lengths)
            for tile in range(length // size, (length + tokens) // size)
        ]
        if tiles:
            sequences, keys = torch.tensor(tiles, device=self.k.device).T
            page, row = self.table.find(sequences, keys)
            self.bounds.write(page, row // size, self.k, self.v, self.state)

    def _state_at(self, keys: list[int]) -> Tensor:
        """Returns the state of one key of each sequence, 0 before the first key."""
        keys = torch.tensor(keys, device=self.state.device)
        b = torch.arange(self.batch, device=keys.device)
        page, row = self.table.find(b, keys.clamp(min=0))
        state = self.state[page, :, row][:, :, None]
        return torch.where((keys < 0).view(-1, *[1] * (state.dim() - 1)), 0, state)

    def _checked_lengths(self, lengths) -> list[int]:
        if isinstance(lengths, Tensor) and not lengths.is_floating_point():
            lengths = lengths.tolist()
        if isinstance(lengths, int) and not isinstance(lengths, bool):
            lengths = [lengths] * self.batch
        if not isinstance(lengths, list) or not all(isinstance(x, int) for x in lengths):
            raise TypeError(f"lengths is {lengths!r}; it must be an int, or one for each sequence")
        if len(lengths) != self.batch:
            raise ValueError(f"lengths has {len(lengths)} entries; it must have {self.batch}")
        for b, (length, now) in enumerate(zip(lengths, self.lengths, strict=True)):
            if not 0 <= length <= now:
                raise ValueError(f"lengths[{b}] is {length}; it may be 0 to {now}")
            if self.window is None or length == 0:
                continue
            first_kept = self._written[b] - self.table.keys
            if length - self.window + 1 < first_kept:
                raise ValueError(
                    f"lengths[{b}] is {length}; it may be 0, or"
                    f" {first_kept + self.window - 1} to {now}: older keys are overwritten"
                )
        return lengths


def layout_of(state: Tensor | None) -> tuple | None:
    """Returns what the states of all tokens in a cache have in common."""
    return None if state is None else (state.shape[1], *state.shape[3:], state.dtype)


def _longer(x: Tensor, pages: int) -> Tensor:
    longer = x.new_empty((pages, *x.shape[1:]))
    longer[: x.shape[0]] = x
    return longer


def _check_int(name: str, value, least: int, most: int | None = None) -> None:
    allowed = f"{least} or more" if most is None else f"{least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be an int, {allowed}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name} is {value}; it may be {allowed}")
