"""Checks of `flash_attn_with_kvcache`, before anything is written to the caller's cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ..shared_constants import TILE_KEYS
from ..validation import check_each, check_heads, refuse_gradients
from .caches import Cache


def check_tensors(q, k_cache, v_cache, k, v, alibi_slopes) -> None:
    """Checks types and shapes of all queries, keys and values."""
    if (k is None) != (v is None):
        given, missing = ("v", "k") if k is None else ("k", "v")
        raise ValueError(f"{given} is given and {missing} is None; tokens have both")
    new = {} if k is None else {"k": k, "v": v}
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **new}
    check_each(tensors, "(batch, sequence, heads, head_dim)")
    check_heads(q, k_cache, 2, ("q", "k_cache"))
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"v_cache has shape {tuple(v_cache.shape)}; its first three dimensions must be those of"
            f" k_cache, {tuple(k_cache.shape[:3])}"
        )
    if k is not None:
        for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
            if cache.is_inference() and not torch.is_inference_mode_enabled():
                raise ValueError(
                    f"{name}_cache was created in inference mode and can only be written to there"
                )
            expected = (q.shape[0], k.shape[1], *cache.shape[2:])
            if x.shape != expected:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}; it must be (batch, new tokens, those of"
                    f" {name}_cache), {expected}"
                )
    if isinstance(alibi_slopes, Tensor):
        tensors["alibi_slopes"] = alibi_slopes
    refuse_gradients(tensors)


def table(q: Tensor, k_cache: Tensor, cache_batch_idx, block_table) -> Tensor:
    """The entries of the cache with the keys of each sequence, (batch, columns) int32."""
    batch = q.shape[0]
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError(
                "cache_batch_idx is given with block_table, which determines the entries;"
                " it must be None"
            )
        _check_ints("block_table", block_table, q, (batch, None))
        size = k_cache.shape[1]
        if size < 1 or (size > TILE_KEYS and size % TILE_KEYS):
            raise ValueError(
                f"k_cache has pages of {size} keys; they may have 1 to {TILE_KEYS}, or a multiple"
                f" of {TILE_KEYS}"
            )
        return block_table.contiguous()
    if cache_batch_idx is None:
        if k_cache.shape[0] != batch:
            raise ValueError(
                f"k_cache has batch {k_cache.shape[0]}; without cache_batch_idx it must be that of"
                f" q, {batch}"
            )
        return torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]
    _check_ints("cache_batch_idx", cache_batch_idx, q, (batch,))
    _check_entries("cache_batch_idx", cache_batch_idx, k_cache.shape[0])
    return cache_batch_idx.contiguous()[:, None]


def lengths(q: Tensor, k, cache: Cache, cache_seqlens, cache_leftpad) -> tuple[Tensor, Tensor]:
    """The end of the old keys and the beginning of each sequence, (batch,) int64."""
    batch = q.shape[0]
    name = "cache_seqlens"
    if cache_seqlens is None:
        if k is not None:
            raise ValueError(f"{name} is None; with k it must give the position of these keys")
        cache_seqlens = cache.capacity
    if isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    if not isinstance(cache_seqlens, Tensor):
        raise TypeError(
            f"{name} is a {type(cache_seqlens).__name__}; it must be None, an int or a torch.Tensor"
        )
    _check_ints(name, cache_seqlens, q, (batch,))
    if (cache_seqlens < 0).any():
        raise ValueError(f"{name} has {int(cache_seqlens.min())}; it must be 0 or more")
    if cache_leftpad is None:
        return cache_seqlens.long(), torch.zeros(batch, dtype=torch.int64, device=q.device)
    name = "cache_leftpad"
    _check_ints(name, cache_leftpad, q, (batch,))
    wrong = (cache_leftpad < 0) | (cache_leftpad > cache_seqlens)
    if wrong.any():
        b = int(wrong.nonzero()[0])
        raise ValueError(
            f"{name}[{b}] is {int(cache_leftpad[b])}; it may be 0 to cache_seqlens[{b}],"
            f" {int(cache_seqlens[b])}"
        )
    return cache_seqlens.long(), cache_leftpad.long()


def check_capacity(cache: Cache, lengths: Tensor) -> None:
    """Checks that the cache has room for `lengths` keys of each sequence."""
    if (lengths > cache.capacity).any():
        raise ValueError(
            f"cache_seqlens with the new tokens is {int(lengths.max())}; it may be at most the"
            f" capacity of a sequence, {cache.capacity}"
        )
    _check_entries("block_table", cache.table[cache.holds(lengths)], cache.k.shape[0])


def check_rotary(q, k, cos, sin, positions: Tensor, new: Tensor | None) -> None:
    """Checks the tables of rotary embedding, if given, for q and k at their positions."""
    if cos is None and sin is None:
        return
    if k is None:
        raise ValueError("rotary_cos is given and k is None; only new tokens are rotated")
    tables = {"rotary_cos": cos, "rotary_sin": sin}
    for name, x in tables.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; cosines and sines must be tensors")
        if x.dtype not in (q.dtype, torch.float32):
            raise TypeError(f"{name} is {x.dtype}; it must be {q.dtype}, as q is, or torch.float32")
        if x.dim() != 2 or not 1 <= x.shape[1] <= q.shape[3] // 2:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; it must be (positions, rotary_dim / 2), with"
                f" rotary_dim up to head_dim, {q.shape[3]}"
            )
        if x.shape != cos.shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; it must be that of rotary_cos,"
                f" {tuple(cos.shape)}"
            )
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}; it must be on the device of q, {q.device}")
    last = max((int(x.max()) for x in (positions, new) if x.numel()), default=-1)
    if last >= len(cos):
        raise ValueError(f"rotary_cos has {len(cos)} positions; the tokens need {last + 1}")


def _check_ints(name: str, x, q: Tensor, shape: tuple[int | None, ...]) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
    if x.dtype != torch.int32:
        raise TypeError(f"{name} is {x.dtype}; it must be torch.int32")
    if x.dim() != len(shape) or any(
        n not in (None, m) for n, m in zip(shape, x.shape, strict=True)
    ):
        expected = "(batch,)" if len(shape) == 1 else "(batch, columns)"
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; it must be {expected}, with batch {shape[0]}"
        )
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}; it must be on the device of q, {q.device}")


def _check_entries(name: str, entries: Tensor, count: int) -> None:
    outside = (entries < 0) | (entries >= count)
    if outside.any():
        raise ValueError(
            f"{name} has the entry {int(entries[outside][0])}; it may be 0 to {count - 1}"
        )
