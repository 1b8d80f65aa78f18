"""The public call: validate, lower the bias for the whole sequence, attend in a ring."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..attention import complete, lowered_over
from ..backends import CONTEXT_PARALLELISM
from ..forms import DistributableForm, Form, Geometry
from ..sequences import Sequences
from ..validation import as_int
from .agreement import check_same_call
from .attention import RingAttention
from .partition import Settings
from .prefix_sums import exclusive_chunk_sums
from .ring import Ring, Traffic


@torch.compiler.disable  # Data-dependent communication cannot be traced.
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias=None,
    *,
    group: dist.ProcessGroup | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    tolerance: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    traffic: Traffic | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`biased_flash_attn` for a sequence that is sharded over ranks; each rank gets its queries'
    outputs.

    All ranks of the group must make the same call, each with its partition of every tensor as
    returned by `shard`: of 2R chunks, rank r of R has chunks r and 2R - 1 - r. Keys and values are
    exchanged in messages that overlap with the computation; a rank holds at most the partitions of
    two ranks and the messages in flight, independently of the number of ranks. Keys of negligible
    softmax mass for a rank are not sent to it, in both passes; only a small summary of all keys is
    exchanged. All ranks must also run the backward pass.

    Args:
        q: (B, H, N / R, D), as for `biased_flash_attn`, but with as many queries as keys.
        k: (B, Hkv, N / R, D) with H a multiple of Hkv.
        v: (B, Hkv, N / R, Dv).
        bias: a bias of `biased_flash_attn.biases`, or None: one of positions, the same on all
            ranks, or a `CumulativeBias` with the steps and gains of this rank's tokens, such as
            `Cable` called on their hidden states; its prefix sums continue across ranks. Gradients
            of parameters are partial: their sum over ranks is the gradient of the sum of the ranks'
            losses, and their average, as in DDP and FSDP, that of the average loss. A function of
            the distance has a table of all N distances on every rank.
        group: the ranks over which the sequence is sharded; None for all.
        causal: whether key j is visible only when j <= p, by the positions in the sequence.
        window: if given, the number of past keys visible to a query, its own included.
        scale: factor of q k^T, 1 / sqrt(D) by default.
        tolerance: the fraction of each query's softmax mass, in [0, 1), that may be skipped over
            all ranks together: as in `biased_flash_attn`.
        return_lse: also return log sum_j exp(scale q k^T + bias), natural logarithm.
        backend: "triton" (GPUs) or "cpu", which runs or raises; None chooses.
        traffic: counts the bytes that this rank sends for this call, its backward pass included.

    Returns:
        o (B, H, N / R, Dv) in q's dtype and, with return_lse, lse (B, H, N / R) in float32, or
        float64 for float64. A query without visible keys has o = 0 and lse = -inf.

    Raises:
        TypeError, ValueError: naming the argument, its value and the permitted values.
        RuntimeError: if a rank has exited, or did not respond within the timeout that was passed to
            `init_process_group`; it names the ranks and the hop.

    The ring follows Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite
    Context", 2023.
    """
    if traffic is not None and not isinstance(traffic, Traffic):
        raise TypeError(f"traffic is a {type(traffic).__name__}; it must be None or a Traffic")
    ring, window = Ring(group, traffic), as_int(window)
    whole = complete(
        q,
        k,
        v,
        partial(_own_chunks, ranks=ring.size, causal=causal, window=window),
        partial(_lowered, bias, ring.size),
        causal=causal,
        window=window,
        scale=scale,
        tolerance=tolerance,
        backend=backend,
        call=CONTEXT_PARALLELISM,
    )
    check_same_call(ring, whole)
    form, may_skip = whole.form, whole.tolerance > 0 and whole.form.may_skip
    if form.per_token:
        form = form.continued(exclusive_chunk_sums(form.state, ring))
    settings = Settings(
        form.name,
        whole.scale,
        whole.geometry.causal,
        whole.geometry.window,
        whole.tolerance,
        whole.backend,
        may_skip,
    )
    with torch.autocast(whole.q.device.type, enabled=False):
        o, lse = RingAttention.apply(settings, ring, whole.q, whole.k, whole.v, *form.tensors)
    return (o, lse) if return_lse else o


def _own_chunks(
    q: Tensor, k: Tensor, v: Tensor, *, ranks: int, causal: bool, window: int | None
) -> Geometry:
    """This rank's two chunks, as packed sequences."""
    n_local = q.shape[2]
    if k.shape[2] != n_local or n_local % 2 or n_local == 0:
        raise ValueError(
            f"q has {n_local} rows and k has {k.shape[2]}; both must be the same even number, two"
            " chunks: see shard"
        )
    n = n_local // 2
    rows = torch.tensor([[0, n, 0, n, 0], [n, n, n, n, 0]], device=q.device)
    chunks = Sequences(rows, n, n, n_local, n_local, is_packed=True)
    window = None if window is None else min(window, n_local * ranks)
    return Geometry(n, n, causal, window, chunks)


def _lowered(bias, ranks: int, q: Tensor, chunks: Geometry) -> Form:
    """Returns the form of the whole sequence; if it is per token, that of this rank's two chunks
    separately; if it is per pair, that of this rank's queries."""
    n_local = q.shape[2]
    whole = n_local * ranks

    def geometry_of(form: Form) -> Geometry:
        if not isinstance(form, DistributableForm):
            raise ValueError(f"bias has the form {form.name!r}, which cannot be distributed")
        if form.per_pair or form.spans_sequence:
            n_query = n_local if form.per_pair else whole
            return Geometry(n_query, whole, chunks.causal, chunks.window)
        return chunks

    return lowered_over(bias, q, chunks, geometry_of)
