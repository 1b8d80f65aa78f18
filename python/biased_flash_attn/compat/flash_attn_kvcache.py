"""The function of flash-attn 2 for decoding, with a cache that belongs to the caller."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import backends, operators
from ..attention import attend, lowered, prepared
from ..backends import DECODING
from ..geometry import Geometry
from ..problem import Pages, Problem
from ..sequences import Sequences
from ..validation import check_scale, refuse_meta
from . import kvcache_arguments as arguments
from .arguments import AlibiSlopes, Visibility, alibi, check_softcap, contiguous_rows, visibility
from .caches import Cache
from .rotary import rotated

# With more queries the ordinary kernels are faster, and skipping is worthwhile.
_FEW_QUERIES = 128


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Writes k and v to a cache and attends to it, with the signature of flash-attn 2 (Dao, 2023).

    The cache belongs to the caller: k and v are written in place as the keys cache_seqlens,
    cache_seqlens + 1, ... of each sequence, and the caller updates cache_seqlens. Attention and lse
    are those of `flash_attn_func` for all keys so far: the last query is aligned with the last key.
    There are no gradients.

    The cache is read in place. Keys of pages, and of a cache that is a slice of a larger one, are
    copied only for calls that are not causal and have several queries, that have cache_leftpad, or
    more than 128 queries. Code without a cache of its own can use `KVCache`, which also skips
    negligible keys and supports every bias.

    Differences from flash-attn, besides those of `flash_attn_func`:

    - Pages may have 1 to 64 keys or any multiple of 64, also with cache_leftpad.
    - rotary_dim may be any even number; rotary_cos and rotary_sin may be float32 for every q.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k_cache: (batch_cache, seqlen_cache, kv_heads, head_dim) or, with block_table, pages
            (num_blocks, page_size, kv_heads, head_dim). Any strides, the last dimension contiguous.
        v_cache: the same for values, whose last dimension may differ.
        k: (batch, seqlen_new, kv_heads, head_dim), or None.
        v: (batch, seqlen_new, kv_heads, value_dim), given with k.
        rotary_cos: (positions, rotary_dim / 2): if given with k, the first rotary_dim channels of k
            are rotated at the positions cache_seqlens, cache_seqlens + 1, ..., and those of q too,
            or all of q at cache_seqlens if the call is neither causal nor has a window.
        rotary_sin: the same for sines.
        cache_seqlens: the number of keys of each sequence before this call, including those that
            cache_leftpad skips, an int or (batch,) int32. None for a full cache.
        cache_batch_idx: (batch,) int32, the entry of the cache for each sequence; by default its
            own index. If several sequences share an entry, it gets k and v of any one of them.
        cache_leftpad: (batch,) int32, the first key of each sequence; 0 by default. Steps with it
            take several times as long.
        block_table: (batch, columns) int32: key n of sequence b is row n % page_size of page
            block_table[b, n // page_size].
        softmax_scale: factor of q k^T, 1 / sqrt(head_dim) by default.
        causal: whether a query sees only keys up to its position.
        window_size: (left, right), as in `flash_attn_func`.
        softcap: 0.
        rotary_interleaved: whether channels 0 and 1, 2 and 3, ... are rotated together, or 0 and
            rotary_dim / 2, 1 and rotary_dim / 2 + 1, ...
        alibi_slopes: (heads,) or (batch, heads) float32.
        num_splits: ignored; the keys are divided automatically.
        return_softmax_lse: also return lse.

    Returns:
        out (batch, seqlen_q, heads, value_dim) in q's dtype and, on request, lse (batch, heads,
        seqlen_q) in float32, or float64 for float64.

    Raises:
        TypeError, ValueError: naming the argument, its value and the permitted values. The cache
            is unchanged.
    """
    check_softcap(softcap), check_scale("softmax_scale", softmax_scale)
    refuse_meta("q", q)
    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    arguments.check_tensors(q, k_cache, v_cache, k, v, alibi_slopes)
    table = arguments.table(q, k_cache, cache_batch_idx, block_table)
    cache = Cache(k_cache, v_cache, table)
    before, begin = arguments.lengths(q, k, cache, cache_seqlens, cache_leftpad)
    after = before + (0 if k is None else k.shape[1])
    arguments.check_capacity(cache, after)
    batch, n_query, heads, _ = q.shape
    mask = visibility(causal, window_size, n_query, int((after - begin).max()) if batch else 0)
    slopes = alibi(alibi_slopes, mask.shift, q, batch, heads)
    if slopes is not None and not slopes.slopes.isfinite().all():
        raise ValueError("alibi_slopes contain NaN or infinities; they must be finite")
    in_order = causal or tuple(window_size) != (-1, -1)
    positions = before[:, None] + torch.arange(n_query, device=q.device) * in_order
    new = None if k is None else before[:, None] + torch.arange(k.shape[1], device=q.device)
    arguments.check_rotary(q, k, rotary_cos, rotary_sin, positions, new)

    step = Step(q.transpose(1, 2), cache, begin, after, mask, slopes, softmax_scale)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        problem = step.over_pages()
        backend = backends.choose(None, problem, DECODING)
        if rotary_cos is not None:
            tables = rotary_cos, rotary_sin
            q = rotated(q, *tables, positions, rotary_interleaved)
            k = rotated(k, *tables, new, rotary_interleaved)
        if k is not None:
            cache.write(k, v, after, backend)
        step = replace(step, q=q.transpose(1, 2))
        o, lse = step.run(replace(problem, q=step.q, backend=backend))
    o = o.transpose(1, 2)
    return (o, lse) if return_softmax_lse else o


@dataclass(frozen=True, eq=False)
class Step:
    """Attention of q (B, H, n, D) to the keys [begin, end) of each sequence, both (B,)."""

    q: Tensor
    cache: Cache
    begin: Tensor
    end: Tensor
    mask: Visibility
    slopes: AlibiSlopes | None
    scale: float | None

    def run(self, over_pages: Problem) -> tuple[Tensor, Tensor]:
        """o (B, H, n, Dv) and lse (B, H, n)."""
        backend = over_pages.backend
        n_query = self.q.shape[2]
        sees_no_future = self.mask.shift == 0 and (self.mask.causal or n_query == 1)
        begins_at_0 = not self.begin.any()
        if backend == "cpu" and self._has_few_queries and sees_no_future and begins_at_0:
            # The decoding kernel reads the keys through the table.
            return operators.decode(over_pages)
        return self._packed(backend)

    @property
    def _has_few_queries(self) -> bool:
        return self.q.shape[2] <= _FEW_QUERIES

    def over_pages(self) -> Problem:
        """The decoding problem, of all keys from the first page on."""
        q, table = self.q, self.cache.table
        k, v = (x.transpose(1, 2) for x in (self.cache.k, self.cache.v))
        scale = q.shape[3] ** -0.5 if self.scale is None else float(self.scale)
        geometry = Geometry(q.shape[2], table.shape[1] * k.shape[2], True, self.mask.window)
        # Without bounds of the keys nothing is skipped.
        pages = Pages(table, self.end)
        form = lowered(self.slopes, q, geometry)
        return Problem(q, k, v, form, geometry, scale, 0.0, "", pages=pages)

    def _packed(self, backend: str) -> tuple[Tensor, Tensor]:
        """o and lse from the ordinary kernels, with the cache entries as packed sequences."""
        batch, _, n_query, _ = self.q.shape
        count = self.end - self.begin
        longest = int(count.max()) if batch else 0
        k, v, first = self.cache.packed(self.end)
        same = torch.full_like(first, n_query)
        keys = first + self.begin, count
        rows = torch.stack([same.cumsum(0) - same, same, *keys, torch.zeros_like(first)], 1)
        sequences = Sequences(rows, n_query, longest, batch * n_query, len(k), is_packed=True)
        if self.mask.shift:
            sequences = sequences.shifted(self.mask.shift, self.mask.shift)
        q = self.q.transpose(1, 2).flatten(0, 1)
        problem = prepared(
            *(x.transpose(0, 1)[None] for x in (q, k, v)),
            bias=self.slopes,
            causal=self.mask.causal,
            window=self.mask.window,
            scale=self.scale,
            tolerance=0.0 if self._has_few_queries else None,
            backend=backend,
            sequences=sequences,
        )
        o, lse = attend(problem)
        o, lse = (x[0].unflatten(1, (batch, n_query)).transpose(0, 1) for x in (o, lse))
        return o, lse.contiguous()
