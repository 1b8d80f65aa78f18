"""The tokens of a batch: which of them form a sequence, and their positions in it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..decoding.kv_cache import KVCache
from ..sequences import check_offsets
from ..validation import check_cu_seqlens, check_mask


def check_ids(tokens: Tensor) -> None:
    """Validates tokens of a vocabulary, except for their values."""
    if not isinstance(tokens, Tensor):
        raise TypeError(f"tokens is a {type(tokens).__name__}; it must be a torch.Tensor")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"tokens is {tokens.dtype}; it must be torch.int64 or torch.int32")
    if tokens.dim() != 2:
        raise ValueError(f"tokens has shape {tuple(tokens.shape)}; it must be (batch, tokens)")


def check_tokens(
    tokens: Tensor,
    cache: KVCache | None = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> int | None:
    """Validates what tokens (B, N, ...) are given with, except for the values of the mask.

    Returns the length of the longest document of cu_seqlens; None without it, in compiled code and
    for meta tensors, where it is unknown. If it is given as max_seqlen, the offsets are not read,
    as a GPU would have to be waited for.
    """
    if key_padding_mask is not None:
        if cache is not None:
            raise ValueError(
                "key_padding_mask is given with a cache; pad on the right and truncate the cache"
            )
        as_heads = tokens[:, None]
        check_mask(key_padding_mask, as_heads, as_heads, causal=True)
    if cu_seqlens is None:
        return None
    if cache is not None:
        raise ValueError("cu_seqlens is given with a cache, which has one sequence in each row")
    if key_padding_mask is not None:
        raise ValueError("cu_seqlens is given with key_padding_mask; packed rows have no padding")
    check_cu_seqlens("cu_seqlens", cu_seqlens, "tokens", tokens)
    batch, total = tokens.shape[:2]
    if batch != 1:
        raise ValueError(
            f"cu_seqlens is given with {batch} rows of tokens; documents are packed in one row"
        )
    if max_seqlen is not None or torch.compiler.is_compiling() or cu_seqlens.is_meta:
        return max_seqlen
    offsets = cu_seqlens.cpu()
    check_offsets("cu_seqlens", offsets, total, "tokens")
    return int(offsets.diff().max()) if len(offsets) > 1 else 0


def positions_of(
    tokens: Tensor,
    cache: KVCache | None = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The positions of tokens (B, N, ...) in their sequences, (B or 1, N) int64.

    They continue those of a cache, and begin with 0 in each document of cu_seqlens. Padding does
    not count: its positions are 0 or that of the last token.
    """
    if key_padding_mask is not None:
        return (key_padding_mask.cumsum(1) - 1).clamp(min=0)
    rows = torch.arange(tokens.shape[1], device=tokens.device)
    if cu_seqlens is not None:
        document = torch.bucketize(rows, cu_seqlens.long(), right=True) - 1
        return (rows - cu_seqlens[document])[None]
    first = torch.tensor([0] if cache is None else cache.lengths, device=tokens.device)
    return first[:, None] + rows
