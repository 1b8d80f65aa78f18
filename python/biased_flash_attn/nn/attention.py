"""Multi-head attention with a position scheme, for a transformer block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..attention import biased_flash_attn
from ..autocast import under_autocast
from ..biases.layers import NormalLinear, dtype_of
from ..decoding.call import biased_flash_attn_with_kvcache
from ..decoding.kv_cache import KVCache
from ..validation import check_tensors
from ..varlen import biased_flash_attn_varlen
from .embeddings import rotated
from .named_biases import applied
from .positions import Positions
from .positions import positions as scheme_of
from .tokens import check_tokens, positions_of


class BiasedAttention(nn.Module):
    """softmax(q k^T / sqrt(D) + bias) v with its projections; D = dim / num_heads.

    The layer creates its bias and calls it on its input, its queries and its keys. So CABLE's two
    linear layers have the same input as the projections.

    Args:
        dim: channels of the hidden states.
        num_heads: H, the number of query heads, which divides dim.
        positions: the position scheme, a name or `Positions`. Position embeddings are added by the
            model, not by the layer.
        kv_heads: Hkv, the number of key and value heads, H by default; query head h reads key head
            h // (H / Hkv).
        causal: whether tokens see only the past.
        backend: as in `biased_flash_attn`.
        out_std: standard deviation of the initial weights of the output projection. Those of the
            others have 0.02, as in GPT-2 (Radford et al., 2019).

    Raises:
        TypeError, ValueError: naming the argument, its value and the permitted values.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        positions: str | Positions = "alibi",
        *,
        kv_heads: int | None = None,
        causal: bool = True,
        backend: str | None = None,
        out_std: float = 0.02,
    ):
        super().__init__()
        scheme = scheme_of(positions)
        kv_heads = num_heads if kv_heads is None else kv_heads
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"num_heads is {num_heads}; it must be positive and divide dim, {dim}")
        if kv_heads < 1 or num_heads % kv_heads:
            raise ValueError(f"kv_heads is {kv_heads}; it must divide num_heads, {num_heads}")
        if scheme.window is not None and not causal:
            raise ValueError("positions has a window, which requires causal=True")
        self.num_heads, self.kv_heads, self.head_dim = num_heads, kv_heads, dim // num_heads
        if scheme.rotary and self.head_dim % 2:
            raise ValueError(f"dim / num_heads is {self.head_dim}; rotary positions need even ones")
        self.rotary, self.window = scheme.rotary, scheme.window
        self.project = NormalLinear(dim, (num_heads + 2 * kv_heads) * self.head_dim)
        self.out = NormalLinear(dim, dim, std=out_std)
        self.bias = scheme.bias(num_heads, dim) if scheme.bias else None
        self.has_positions = scheme.rotary or "positions" in getattr(self.bias, "inputs", ())
        self.fused = FusedAttention(causal, scheme.window, backend)

    def forward(
        self,
        x: Tensor,
        cache: KVCache | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Maps hidden states x (B, N, dim) to (B, N, dim).

        With a cache from `make_cache`, x belongs to the next tokens of its sequences; see
        `biased_flash_attn_with_kvcache`. key_padding_mask is as in `biased_flash_attn`.

        With cu_seqlens, x (1, total, dim) are documents that do not attend to one another, as in
        `biased_flash_attn_varlen`. The offsets (documents + 1,) int32 rise from 0 to the total.
        max_seqlen is at least the longest length; without it, the offsets are read, which
        synchronizes with a GPU. Only one of cache, mask and offsets may be given.
        """
        max_seqlen = check_tokens(x, cache, key_padding_mask, cu_seqlens, max_seqlen)
        heads = self.project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split((self.num_heads, self.kv_heads, self.kv_heads), dim=1)
        positions = None
        if self.has_positions:
            positions = positions_of(x, cache, key_padding_mask, cu_seqlens)
        if self.rotary:
            q, k = rotated(q, positions), rotated(k, positions)
        q, bias, scale = applied(self.bias, x, q, k, positions)
        if cache is None:
            o = self.fused(
                q,
                k,
                v,
                bias,
                scale=scale,
                key_padding_mask=key_padding_mask,
                cu_seqlens=cu_seqlens,
                max_seqlen=max_seqlen,
            )
        else:
            o = biased_flash_attn_with_kvcache(
                q, cache, k, v, bias, scale=scale, backend=self.fused.backend
            )
        return self.out(o.transpose(1, 2).flatten(2))

    def make_cache(self, batch: int, dtype: torch.dtype | None = None) -> KVCache:
        """An empty cache for `batch` sequences, by default in the dtype of the layer's keys, which
        autocast determines where it is on."""
        device = next((x.device for x in self.parameters()), None)
        if dtype is None:
            (keys,) = under_autocast(torch.empty(0, dtype=dtype_of(self.project), device=device))
            dtype = keys.dtype
        return KVCache(
            batch,
            self.kv_heads,
            self.head_dim,
            dtype=dtype,
            device=device,
            window=self.window,
        )


class FusedAttention(nn.Module):
    """`biased_flash_attn` as a module, whose hooks receive q, k, v, the bias and the scale of each
    call. cu_seqlens and max_seqlen, as in `BiasedAttention`, are those of queries and of keys."""

    def __init__(self, causal: bool = True, window: int | None = None, backend: str | None = None):
        super().__init__()
        self.causal, self.window, self.backend = causal, window, backend

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias,
        *,
        scale: float | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        options = {
            "causal": self.causal,
            "window": self.window,
            "scale": scale,
            "backend": self.backend,
        }
        if cu_seqlens is None:
            return biased_flash_attn(q, k, v, bias, key_padding_mask=key_padding_mask, **options)
        q, k, v = under_autocast(q, k, v)
        check_tensors(q, k, v)
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                f"cu_seqlens is given with {q.shape[2]} queries and {k.shape[2]} keys; they must be"
                " as many"
            )
        longest = check_tokens(k.transpose(1, 2), None, key_padding_mask, cu_seqlens, max_seqlen)
        packed = (x[0].transpose(0, 1) for x in (q, k, v))
        lengths = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        o = biased_flash_attn_varlen(*packed, cu_seqlens, cu_seqlens, bias, **lengths, **options)
        return o.transpose(0, 1)[None]
