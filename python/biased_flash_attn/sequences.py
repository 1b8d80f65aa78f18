"""Sequences of different lengths in one call: the rows of tensors that belong to each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("biased_flash_attn", "FRAGMENT")

MOST_SHOWN = 8  # lengths, in an error

_LIBRARY.define(
    "rows_of_offsets(Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt total_q, SymInt total_k,"
    " SymInt? max_seqlen_q, SymInt? max_seqlen_k, str of_q='q', str of_k='k') -> Tensor"
)
_LIBRARY.define("rows_of_mask(Tensor mask, SymInt n_query, str name) -> Tensor")
_LIBRARY.define("prefix_sums(Tensor steps, Tensor lengths, bool reverse) -> Tensor")


class Sequence(NamedTuple):
    """The rows of one sequence: its batch entry, its queries and keys, and its shift, the position
    of its last query minus that of its last key. Tensors with one batch entry broadcast."""

    entry: int
    first_query: int
    n_query: int
    first_key: int
    n_key: int
    shift: int

    def batch_entry(self, x: Tensor) -> Tensor:
        """Selects the batch entry of x: (B or 1, ...) to (1, ...)."""
        return x if x.shape[0] == 1 else x[self.entry : self.entry + 1]

    def queries(self, x: Tensor) -> Tensor:
        """Selects the queries of x: (B or 1, H or 1, query_rows, ...) to (1, H or 1, n_query,
        ...)."""
        return self.batch_entry(x)[:, :, self.first_query : self.first_query + self.n_query]

    def keys(self, x: Tensor) -> Tensor:
        """Selects the keys of x: (B or 1, H or 1, key_rows, ...) to (1, H or 1, n_key, ...)."""
        return self.batch_entry(x)[:, :, self.first_key : self.first_key + self.n_key]

    def places(self, x: Tensor) -> Tensor:
        """Like `keys`, for steps and their prefix sums, which extend to the last query."""
        count = self.n_key + self.shift
        return self.batch_entry(x)[:, :, self.first_key : self.first_key + count]


@dataclass(frozen=True, eq=False)
class Sequences:
    """Ranges of the rows of q and k. Rows outside all ranges are padding.

    rows (B, 5) int64: the first query, number of queries, first key, number of keys and shift of
    each sequence. The shift is the position of its last query minus that of its last key. Packed
    sequences share one batch entry; otherwise sequence b is in batch entry b.
    """

    rows: Tensor
    longest_query: int  # at least the number of queries of any sequence
    longest_key: int
    query_rows: int  # rows of a batch entry of q
    key_rows: int
    is_packed: bool
    longest_shift: int = 0

    @staticmethod
    def from_entries(batch: int, n_query: int, n_key: int, device=None) -> Sequences:
        """Returns sequences that consist of all rows of their batch entries."""
        rows = torch.tensor([[0, n_query, 0, n_key, 0]], device=device).expand(batch, 5)
        return Sequences(rows.contiguous(), n_query, n_key, n_query, n_key, is_packed=False)

    @staticmethod
    def from_offsets(
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        totals: tuple[int, int],
        longest: tuple[int | None, int | None],
        of: tuple[str, str] = ("q", "k"),
    ) -> Sequences:
        """Returns packed sequences.

        Errors call the tensors of the queries and keys `of`, and their offsets and maxima as
        `names_of_sides` does. If a maximum length in `longest` is None, it is read from the
        offsets; while compiling and for meta tensors, the total is used instead.
        """
        rows = torch.ops.biased_flash_attn.rows_of_offsets(
            cu_seqlens_q, cu_seqlens_k, *totals, *longest, *of
        )
        if None in longest:
            found = totals
            if not torch.compiler.is_compiling() and not rows.is_meta:
                found = rows[:, 1:4:2].amax(0).tolist() if len(rows) else (0, 0)
            longest = [f if n is None else n for n, f in zip(longest, found, strict=True)]
        return Sequences(rows, *longest, *totals, is_packed=True)

    @staticmethod
    def from_mask(mask: Tensor, n_query: int, name: str = "key_padding_mask") -> Sequences:
        """Returns the sequences of a padded batch, given by a mask (B, n_key) bool, True for
        tokens.

        Raises ValueError, which calls the mask `name`, if the tokens of a sequence are not
        contiguous.
        """
        rows = torch.ops.biased_flash_attn.rows_of_mask(mask, n_query, name)
        n_key = mask.shape[1]
        return Sequences(rows, n_query, n_key, n_query, n_key, is_packed=False)

    def seems_inverted(self) -> bool:
        """Whether a mask of them is probably True for padding on the right, and False for tokens.

        Some sequences have no tokens, and all others lie at the end of their rows.
        """
        _, _, first, count, _ = self.rows.unbind(1)
        empty = count == 0
        at_end = (first > 0) & (first + count == self.key_rows)
        return bool(empty.any() and (empty | at_end).all()) and self.key_rows > 0

    def shifted(self, shift: int | Tensor, longest: int | None = None) -> Sequences:
        """Returns the sequences with `shift`, an int or (B,), added to the positions of their
        queries.

        longest: an upper bound on the resulting shifts. If it is None, they are read, which
        synchronizes with a GPU, and ValueError is raised if one is negative.
        """
        rows = self.rows.clone()
        rows[:, 4] += shift
        if longest is None:
            least, longest = rows[:, 4].aminmax() if len(rows) else (0, 0)
            if least < 0:
                raise ValueError(f"shift is {int(least)}; it must be 0 or more")
        return replace(self, rows=rows, longest_shift=int(longest))

    def __iter__(self) -> Iterator[Sequence]:
        for b, rows in enumerate(self.rows.tolist()):
            yield Sequence(b, *rows)

    @property
    def places(self) -> int:
        """The length of a batch entry of a tensor of steps, which extend to the last query."""
        return self.key_rows + (0 if self.is_packed else self.longest_shift)

    def prefix_sums(self, steps: Tensor) -> Tensor:
        """Returns the prefix sums of steps (B or 1, H, places), restarted at each sequence,
        float64.

        Raises ValueError if packed sequences have queries beyond their last key.
        """
        if self.is_packed and self.longest_shift:
            raise ValueError("packed sequences have no steps for queries beyond their keys")
        if self.is_packed:
            lengths = self.rows[:, 3]
            lengths = lengths if lengths.is_meta else lengths.cpu()
            return torch.ops.biased_flash_attn.prefix_sums(steps, lengths, False)
        first, count = self.rows[:, 2, None], self.rows[:, 3, None]
        count = count + self.rows[:, 4, None]
        j = torch.arange(self.places, device=steps.device)
        is_token = ((first <= j) & (j < first + count))[:, None]
        return torch.where(is_token, steps, 0).cumsum(-1)

    def at_queries(self, keys: Tensor) -> Tensor:
        """Selects from keys (..., key_rows) the entries at the positions of the queries
        (..., query_rows).

        Raises ValueError if a sequence has more queries than keys, or queries beyond its last key.
        """
        if self.longest_shift:
            raise ValueError("queries extend past the last key; pass one gain per query")
        if not self.is_packed:
            return keys[..., self.key_rows - self.query_rows :]
        if not torch.compiler.is_compiling() and (self.rows[:, 1] > self.rows[:, 3]).any():
            raise ValueError(
                "gain has one number per key and a sequence has more queries than keys; pass one"
                f" per query, {self.query_rows}"
            )
        return keys[..., self.keys_of_queries()]

    def keys_of_queries(self) -> Tensor:
        """Returns the index, in its batch entry, of the key at the position of each query, or
        `places` for queries before the first key. (query_rows,) int64; (B, query_rows) unless
        packed."""
        position = self.positions()
        key = position + self._per_query(self.rows[:, 2])
        key = torch.where((position >= 0) & (key < self.places), key, self.places)
        return key[0] if self.is_packed else key

    def positions(self) -> Tensor:
        """Returns the position of each row of q in its sequence, (1, query_rows) int64, or (B,
        query_rows) unless packed. It is arbitrary for padding."""
        first_query, n_query, _, n_key, shift = self.rows.unbind(1)
        first_rows = self._per_query(n_key + shift - n_query - first_query)
        return first_rows + torch.arange(self.query_rows, device=self.rows.device)

    def _per_query(self, x: Tensor) -> Tensor:
        """Repeats values per sequence (B,): (1, query_rows), or (B, 1) unless packed."""
        if not self.is_packed:
            return x[:, None]
        return x.repeat_interleave(self.rows[:, 1], output_size=self.query_rows)[None]


def empty_rows(like: Tensor, channels: int) -> Tensor:
    """Returns an empty tensor (B, H, N, channels) with the layout of `like` (B, H, N, D): if `like`
    is contiguous as (B, N, H, D), so is the result."""
    batch, heads, n, _ = like.shape
    if _has_bnhd_layout(like):
        return like.new_empty((batch, n, heads, channels)).transpose(1, 2)
    return like.new_empty((batch, heads, n, channels))


def with_layout_of(like: Tensor, x: Tensor) -> Tensor:
    """Returns x (B, H, N, C) in the layout of `empty_rows`."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if _has_bnhd_layout(like) else x


def _has_bnhd_layout(x: Tensor) -> bool:
    return x.stride(1) < x.stride(2)


def names_of_sides(name: str, of: tuple[str, str]) -> tuple[str, str]:
    """The arguments `name` for queries and for keys: a single one if both are parts of one tensor.

    of: the names of the tensors that contain them.
    """
    return (name, name) if of[0] == of[1] else (f"{name}_q", f"{name}_k")


def _rows_of_offsets(
    cu_seqlens_q, cu_seqlens_k, total_q, total_k, max_seqlen_q, max_seqlen_k, of_q="q", of_k="k"
):
    of = of_q, of_k
    sides = zip(
        of,
        names_of_sides("cu_seqlens", of),
        (cu_seqlens_q, cu_seqlens_k),
        (total_q, total_k),
        names_of_sides("max_seqlen", of),
        (max_seqlen_q, max_seqlen_k),
        strict=True,
    )
    # Reading the offsets would synchronize with the GPU.
    unread = cu_seqlens_q.is_cuda and None not in (max_seqlen_q, max_seqlen_k)
    columns = []
    for tensor, name, offsets, total, maximum, longest in sides:
        if not unread:
            check_offsets(name, offsets, total, f"rows of {tensor}")
            _check_longest(maximum, offsets, longest)
        columns += [offsets[:-1], offsets.diff()]
    columns.append(torch.zeros_like(columns[0]))
    return torch.stack(columns, 1).long()


def check_offsets(name: str, offsets: Tensor, total: int, rows: str) -> None:
    """Validates the values of offsets of `total` rows."""
    begin, end, lengths = offsets[0].item(), offsets[-1].item(), offsets.diff()
    if begin != 0:
        hint = ""
        if int(offsets.sum()) == total and (offsets >= 0).all():
            meant = [0, *offsets[:MOST_SHOWN].cumsum(0).tolist()]
            rest = ", ..." if len(offsets) > MOST_SHOWN else ""
            hint = f": offsets are the cumulative sums of lengths, [{str(meant)[1:-1]}{rest}]"
        raise ValueError(f"{name} begins with {begin}; it must begin with 0{hint}")
    if (lengths < 0).any():
        b = int((lengths < 0).nonzero()[0])
        before, after = offsets[b : b + 2].tolist()
        raise ValueError(f"{name} falls from {before} to {after} at {b + 1}; it must not decrease")
    if end != total:
        raise ValueError(f"{name} ends with {end}; it must end with the number of {rows}, {total}")


def _check_longest(name: str, offsets: Tensor, longest: int | None) -> None:
    lengths = offsets.diff()
    if longest is not None and len(lengths) and (most := int(lengths.max())) > longest:
        raise ValueError(f"{name} is {longest}; it must be at least {most}")


def _rows_of_mask(mask, n_query, name):
    n_key = mask.shape[1]
    count = mask.sum(1)
    first = mask.byte().argmax(1) if n_key else count
    end = torch.where(count > 0, n_key - mask.flip(1).byte().argmax(1), first) if n_key else count
    if (holes := (end - first != count)).any():
        b = int(holes.nonzero()[0])
        raise ValueError(
            f"{name} has padding between the tokens of batch entry {b};"
            " the tokens of a sequence must lie side by side, and True is for tokens"
        )
    # A query on padding, or before the first slot, is padding.
    before = n_key - n_query
    first_query = (first - before).clamp(0, n_query)
    end_query = torch.where(count > 0, (end - before).clamp(0, n_query), first_query)
    n_query = end_query - first_query
    return torch.stack([first_query, n_query, first, count, torch.zeros_like(count)], 1)


def _prefix_sums(steps, lengths, reverse):
    parts = steps.split(lengths.tolist(), -1)
    if reverse:
        return torch.cat([x.flip(-1).cumsum(-1).flip(-1) for x in parts], -1)
    return torch.cat([x.cumsum(-1) for x in parts], -1) if parts else steps.clone()


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("rows_of_offsets", _rows_of_offsets, _device)
    _LIBRARY.impl("rows_of_mask", _rows_of_mask, _device)
    _LIBRARY.impl("prefix_sums", _prefix_sums, _device)


@torch.library.register_fake("biased_flash_attn::rows_of_offsets", lib=_LIBRARY)
def _(cu_seqlens_q, *rest):
    return cu_seqlens_q.new_empty((cu_seqlens_q.shape[0] - 1, 5), dtype=torch.int64)


@torch.library.register_fake("biased_flash_attn::rows_of_mask", lib=_LIBRARY)
def _(mask, n_query, name):
    return mask.new_empty((mask.shape[0], 5), dtype=torch.int64)


@torch.library.register_fake("biased_flash_attn::prefix_sums", lib=_LIBRARY)
def _(steps, lengths, reverse):
    return torch.empty_like(steps, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output):
    _, lengths, ctx.reverse = inputs
    ctx.save_for_backward(lengths)


def _differentiate(ctx, grad):
    (lengths,) = ctx.saved_tensors
    return torch.ops.biased_flash_attn.prefix_sums(grad, lengths, not ctx.reverse), None, None


torch.library.register_autograd(
    "biased_flash_attn::prefix_sums", _differentiate, setup_context=_save, lib=_LIBRARY
)
