"""The tokens of a batch: which of them are padding, and their positions."""

from __future__ import annotations

import torch
from torch import Tensor

from ..decoding.kv_cache import KVCache
from ..validation import check_mask


def check_padding(tokens: Tensor, cache: KVCache | None, key_padding_mask: Tensor | None) -> None:
    """Validates the mask of tokens (B, N, ...), except for its values."""
    if key_padding_mask is None:
        return
    if cache is not None:
        raise ValueError(
            "key_padding_mask is given with a cache; pad on the right and truncate the cache"
        )
    as_heads = tokens[:, None]
    check_mask(key_padding_mask, as_heads, as_heads, causal=True)


def positions_of(
    tokens: Tensor, cache: KVCache | None = None, key_padding_mask: Tensor | None = None
) -> Tensor:
    """The positions of tokens (B, N, ...), (B or 1, N): from 0, or from the end of a cache.

    They count tokens only, and those of padding are arbitrary, but not beyond the tokens.
    """
    if key_padding_mask is not None:
        return (key_padding_mask.cumsum(1) - 1).clamp(min=0)
    first = torch.tensor([0] if cache is None else cache.lengths, device=tokens.device)
    return first[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
