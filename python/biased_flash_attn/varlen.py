"""Attention to packed sequences of different lengths."""

from __future__ import annotations

from torch import Tensor

from .attention import attend, prepared
from .sequences import Sequences
from .validation import check_packed


def biased_flash_attn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    bias=None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    tolerance: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`biased_flash_attn` of sequences that lie one after the other, each on its own.

    Sequence b has the queries from cu_seqlens_q[b] to before cu_seqlens_q[b + 1] and the keys from
    cu_seqlens_k[b] to before cu_seqlens_k[b + 1]. Alignment, distances, windows and the sums of a
    cumulative bias are its own; it may lack queries, keys or both. The arguments that are not here
    mean what they mean in `biased_flash_attn`.

    Args:
        q: (total queries, H, D), any strides with a contiguous last dimension.
        k: (total keys, Hkv, D).
        v: (total keys, Hkv, Dv).
        cu_seqlens_q: (B + 1,) int32, on q's device: 0, the running sum of the sequences' numbers of
            queries, and so at the end the total.
        cu_seqlens_k: (B + 1,) int32, the same of keys.
        bias: a bias of positions, which all sequences share, or a `CumulativeBias` with steps
            (1, H, total keys), such as a `Cable` called on hidden states (1, total, dim).
        max_seqlen_q: if given, at least the length of the longest sequence. Without both, a GPU is
            waited for to read and check the offsets; with both, they are not checked there. In
            compiled code, where they are not known either, tables are as long as the total.
        max_seqlen_k: the same of keys.

    Returns:
        o (total queries, H, Dv) in q's dtype and, if asked, lse (H, total queries).

    Raises:
        TypeError, ValueError: naming the argument, what it was and what it may be.
    """
    check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    sequences = Sequences.of_offsets(
        cu_seqlens_q,
        cu_seqlens_k,
        (q.shape[0], k.shape[0]),
        (max_seqlen_q, max_seqlen_k),
    )
    problem = prepared(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        *(bias, causal, window, scale, tolerance, backend),
        sequences=sequences,
    )
    o, lse = attend(problem)
    o, lse = o[0].transpose(0, 1), lse[0]
    return (o, lse) if return_lse else o
