"""Attention for packed sequences of different lengths."""

from __future__ import annotations

from torch import Tensor

from .attention import attend, prepared
from .keywords import explains_keywords
from .sequences import Sequences
from .validation import as_int, check_packed


@explains_keywords()
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
    """`biased_flash_attn` for sequences that are concatenated and do not attend to one another.

    Sequence b has the queries q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]] and the keys
    k[cu_seqlens_k[b] : cu_seqlens_k[b + 1]]; either may be empty. Alignment, distances, windows and
    the sums of a cumulative bias are those of each sequence alone. Arguments that are not listed
    here are as in `biased_flash_attn`.

    Args:
        q: (total queries, H, D), any strides with a contiguous last dimension.
        k: (total keys, Hkv, D).
        v: (total keys, Hkv, Dv).
        cu_seqlens_q: (B + 1,) int32 on q's device, the cumulative numbers of queries, from 0 to the
            total.
        cu_seqlens_k: (B + 1,) int32, the same for keys.
        bias: a bias of positions, which all sequences share, or a `CumulativeBias` with steps
            (1, H, total keys), such as a `Cable` called on hidden states (1, total, dim).
        max_seqlen_q: if given, at least the largest number of queries of a sequence. Unless both
            maxima are given, the call synchronizes with a GPU to read and check the offsets; with
            both, offsets on a GPU are not checked. In compiled code without them, tables are as
            long as the total.
        max_seqlen_k: the same for keys.

    Returns:
        o (total queries, H, Dv) in q's dtype and, with return_lse, lse (H, total queries).

    Raises:
        TypeError, ValueError: naming the argument, its value and the permitted values.
    """
    max_seqlen_q, max_seqlen_k = as_int(max_seqlen_q), as_int(max_seqlen_k)
    check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    sequences = Sequences.from_offsets(
        cu_seqlens_q,
        cu_seqlens_k,
        (q.shape[0], k.shape[0]),
        (max_seqlen_q, max_seqlen_k),
    )
    problem = prepared(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        bias,
        causal,
        window,
        scale,
        tolerance,
        backend,
        sequences=sequences,
    )
    o, lse = attend(problem)
    o, lse = o[0].transpose(0, 1), lse[0]
    return (o, lse) if return_lse else o
