"""The functions of flash-attn 2 for training: one batch, or packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import attend, prepared
from ..autocast import under_autocast
from ..sequences import Sequences, names_of_sides
from ..validation import as_int, check_each, check_heads, check_packed, check_scale
from .arguments import alibi, check_dropout, check_softcap, contiguous_rows, visibility

_LAYOUT = "(batch, sequence, heads, head_dim)"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """`biased_flash_attn` with the signature of flash-attn 2 (Dao, 2023).

    Query i has position p = i + seqlen_k - seqlen_q: the last query is aligned with the last key.

    Differences from flash-attn:

    - alibi_slopes and lse are differentiable.
    - lse is that of the logits with the bias exactly as written. With alibi_slopes, in causal calls
      without a limit on the left, flash-attn omits a term that is constant in each row, so its lse
      is larger by slope * p; outputs are the same.
    - lse of a row that sees no key is -inf here and inf in flash-attn. Its output is 0 in both.
    - Windows are always as documented below. flash-attn treats a side of seqlen_k or more as no
      limit, so queries before the first key see keys beyond their window.
    - float32, float64 and CPUs are supported, and any head_dim up to 512, or 256 on GPUs,
      which v need not share.
    - Dropout and softcap are not supported: values other than 0 are refused.

    Args:
        q: (batch, seqlen_q, heads, head_dim). It is copied if its last dimension is not contiguous.
        k: (batch, seqlen_k, kv_heads, head_dim); kv_heads divides heads.
        v: (batch, seqlen_k, kv_heads, value_dim).
        dropout_p: 0.
        softmax_scale: factor of q k^T, 1 / sqrt(head_dim) by default.
        causal: whether key j is visible only when j <= p.
        window_size: (left, right): key j is visible when p - left <= j <= p + right. -1 is no
            limit; with causal, right is 0.
        softcap: 0.
        alibi_slopes: (heads,) or (batch, heads) float32, for the bias -slope |p - j|.
        deterministic: ignored, as results are always deterministic.
        return_attn_probs: also return lse and None in place of the probabilities, which flash-attn
            returns only with dropout.

    Returns:
        out (batch, seqlen_q, heads, value_dim) in q's dtype, contiguous if q is. With
        return_attn_probs (out, lse, None), lse (batch, heads, seqlen_q) in float32, or float64 for
        float64.

    Raises:
        TypeError, ValueError: naming the argument, its value and the permitted values.
    """
    check_dropout(dropout_p), check_softcap(softcap)
    check_scale("softmax_scale", softmax_scale)
    q, k, v = (contiguous_rows(x) for x in under_autocast(q, k, v))
    check_batch(q, k, v)
    (batch, n_query, heads, _), n_key = q.shape, k.shape[1]
    mask = visibility(causal, window_size, n_query, n_key)
    bias = alibi(alibi_slopes, mask.shift, q, batch, heads)
    sequences = None
    if mask.shift:
        sequences = Sequences.from_entries(batch, n_query, n_key, q.device)
        sequences = sequences.shifted(mask.shift, mask.shift)
    problem = prepared(
        *(x.transpose(1, 2) for x in (q, k, v)),
        bias=bias,
        causal=mask.causal,
        window=mask.window,
        scale=softmax_scale,
        tolerance=None,
        backend=None,
        sequences=sequences,
    )
    o, lse = attend(problem)
    o = o.transpose(1, 2)
    return (o, lse, None) if return_attn_probs else o


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """`flash_attn_func` for packed sequences, which do not see one another.

    Everything that is not mentioned, including the differences, is as in `flash_attn_func`.

    Args:
        q: (total_q, heads, head_dim).
        k: (total_k, kv_heads, head_dim).
        v: (total_k, kv_heads, value_dim).
        cu_seqlens_q: (batch + 1,) int32, the cumulative numbers of queries, from 0 to total_q.
        cu_seqlens_k: (batch + 1,) int32, the same for keys.
        max_seqlen_q: at least the largest number of queries of a sequence.
        max_seqlen_k: the same for keys.
        alibi_slopes: (heads,) or (batch, heads) float32.
        block_table: None. Pages are supported by `flash_attn_with_kvcache`.

    Returns:
        out (total_q, heads, value_dim), contiguous if q is. With return_attn_probs
        (out, lse, None), lse (heads, total_q).

    Raises:
        TypeError, ValueError: naming the argument, its value and the permitted values.
    """
    if block_table is not None:
        raise ValueError(
            "block_table is given; it must be None: flash_attn_with_kvcache reads pages"
        )
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
    )


def varlen(
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
    of: tuple[str, str] = ("q", "k"),
):
    """`flash_attn_varlen_func` for queries and keys of tensors that errors call `of`."""
    check_dropout(dropout_p), check_softcap(softcap)
    check_scale("softmax_scale", softmax_scale)
    longest = as_int(max_seqlen_q), as_int(max_seqlen_k)
    for name, n in zip(names_of_sides("max_seqlen", of), longest, strict=True):
        if isinstance(n, bool) or not isinstance(n, (int, torch.SymInt)):
            raise TypeError(f"{name} is {n!r}; it must be an int")
        if n < 0:
            raise ValueError(f"{name} is {n}; it must be a nonnegative int")
    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, *longest)
    mask = visibility(causal, window_size, *longest)
    bias = alibi(alibi_slopes, mask.shift, q, cu_seqlens_q.shape[0] - 1, q.shape[1])
    totals = q.shape[0], k.shape[0]
    sequences = Sequences.from_offsets(cu_seqlens_q, cu_seqlens_k, totals, longest, of)
    if mask.shift:
        sequences = sequences.shifted(mask.shift, mask.shift)
    problem = prepared(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        bias=bias,
        causal=mask.causal,
        window=mask.window,
        scale=softmax_scale,
        tolerance=None,
        backend=None,
        sequences=sequences,
    )
    o, lse = attend(problem)
    o, lse = o[0].transpose(0, 1), lse[0]
    return (o, lse, None) if return_attn_probs else o


def check_batch(q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str, str] = ("q", "k", "v")):
    """Checks shapes in flash-attn's layout. names: what errors call q, k and v."""
    check_each(dict(zip(names, (q, k, v), strict=True)), _LAYOUT)
    check_heads(q, k, heads_at=2, names=names[:2])
    q_name, k_name, v_name = names
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"{v_name} has shape {tuple(v.shape)}; its batch, sequence and heads must be those of"
            f" {k_name}, {tuple(k.shape[:3])}"
        )
    if k.shape[0] != q.shape[0]:
        raise ValueError(
            f"{k_name} has batch {k.shape[0]}; it must be that of {q_name}, {q.shape[0]}"
        )
