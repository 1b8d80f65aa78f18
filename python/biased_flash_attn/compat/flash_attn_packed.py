"""The functions of flash-attn 2 for q, k and v, or k and v, that are parts of one tensor."""

from __future__ import annotations

from torch import Tensor

from ..autocast import under_autocast
from ..validation import check_cu_seqlens, check_each, check_heads
from .arguments import contiguous_rows
from .flash_attn import check_batch, flash_attn_func, varlen

Results = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_func` for q, k and v in one tensor, of which they are views.

    Everything that is not mentioned, including the differences, is as in `flash_attn_func`.

    Args:
        qkv: (batch, sequence, 3, heads, head_dim): q, k and v, in this order.

    Returns:
        out (batch, sequence, heads, head_dim), contiguous. With return_attn_probs
        (out, lse, None), lse (batch, heads, sequence).

    Raises:
        TypeError, ValueError: naming the argument, its value and the permitted values.
    """
    return flash_attn_func(
        *_parts("qkv", qkv, "(batch, sequence, 3, heads, head_dim)"),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_func` for k and v in one tensor, of which they are views.

    Everything that is not mentioned, including the differences, is as in `flash_attn_func`.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        kv: (batch, seqlen_k, 2, kv_heads, head_dim): k and v, in this order.

    Returns:
        out (batch, seqlen_q, heads, head_dim), contiguous if q is. With return_attn_probs
        (out, lse, None), lse (batch, heads, seqlen_q).

    Raises:
        TypeError, ValueError: naming the argument, its value and the permitted values.
    """
    q, kv = under_autocast(contiguous_rows(q), kv)
    k, v = _parts("kv", kv, "(batch, sequence, 2, heads, head_dim)")
    check_batch(q, k, v, ("q", "kv", "kv"))
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_varlen_func` for q, k and v in one tensor, of which they are views.

    Everything that is not mentioned, including the differences, is as in `flash_attn_varlen_func`.

    Args:
        qkv: (total, 3, heads, head_dim): q, k and v, in this order.
        cu_seqlens: (batch + 1,) int32, the cumulative lengths of the sequences, from 0 to total.
        max_seqlen: at least the length of the longest sequence.

    Returns:
        out (total, heads, head_dim), contiguous. With return_attn_probs (out, lse, None), lse
        (heads, total).

    Raises:
        TypeError, ValueError: naming the argument, its value and the permitted values.
    """
    q, k, v = _parts("qkv", qkv, "(total, 3, heads, head_dim)")
    check_cu_seqlens("cu_seqlens", cu_seqlens, "qkv", qkv)
    return varlen(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        return_attn_probs,
        of=("qkv", "qkv"),
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_varlen_func` for k and v in one tensor, of which they are views.

    Everything that is not mentioned, including the differences, is as in `flash_attn_varlen_func`.

    Args:
        q: (total_q, heads, head_dim).
        kv: (total_k, 2, kv_heads, head_dim): k and v, in this order.

    Returns:
        out (total_q, heads, head_dim), contiguous if q is. With return_attn_probs
        (out, lse, None), lse (heads, total_q).

    Raises:
        TypeError, ValueError: naming the argument, its value and the permitted values.
    """
    q, kv = under_autocast(contiguous_rows(q), kv)
    k, v = _parts("kv", kv, "(total, 2, heads, head_dim)")
    check_each({"q": q, "kv": k}, "(total, heads, head_dim)")
    check_heads(q[None], k[None], heads_at=2, names=("q", "kv"))
    return varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        return_attn_probs,
        of=("q", "kv"),
    )


def _parts(name: str, packed: Tensor, layout: str) -> tuple[Tensor, ...]:
    """The tensors that are stacked in dimension -3 of `packed`, one per letter of its name."""
    packed = contiguous_rows(packed)
    check_each({name: packed}, layout)
    if packed.shape[-3] != len(name):
        raise ValueError(f"{name} has shape {tuple(packed.shape)}; it must be {layout}")
    return packed.unbind(-3)
