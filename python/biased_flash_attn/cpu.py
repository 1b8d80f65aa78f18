"""The C++ kernels on tensors: allocates the results and hands addresses and strides to `_C`."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _C
from .sequences import Sequences, empty_rows

_DTYPE_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}

_ENDLESS = 2**40  # a window longer than any sequence


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Tensor | None,
    gain: Tensor | None,
    form: str,
    scale: float,
    causal: bool,
    window: int | None,
    plan: Tensor | None = None,
    sequences: Sequences | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns o (B, H, Nq, Dv) in q's dtype and lse (B, H, Nq), float32 or float64 for float64."""
    terms, gain = _per_head(terms, q, form, sequences), _per_head(gain, q, form, sequences)
    o = empty_rows(q, v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    if sequences is not None:  # padding stays as it is
        o.zero_(), lse.fill_(-torch.inf)
    _C.forward(
        *_problem(q, k, v, terms, gain, form, scale, causal, window, plan, sequences),
        _address(o),
        _address(lse),
    )
    return o, lse


def backward(
    grad_o: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    terms: Tensor | None,
    gain: Tensor | None,
    form: str,
    scale: float,
    causal: bool,
    window: int | None,
    with_bias_gradient: bool,
    plan: Tensor | None = None,
    sequences: Sequences | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of q, k, v, terms and gain; the last two only where wanted."""
    # What autograd hands over may be expanded, as the gradient of a sum is; the kernel reads rows.
    grad_o = grad_o if grad_o.stride(3) == 1 else grad_o.contiguous()
    grad_lse = grad_lse.contiguous()
    grad_q, grad_k, grad_v = (empty_rows(x, x.shape[3]) for x in (q, k, v))
    if sequences is not None:
        grad_q.zero_(), grad_k.zero_(), grad_v.zero_()
    full_terms, full_gain = (_per_head(x, q, form, sequences) for x in (terms, gain))
    wanted = (x if with_bias_gradient else None for x in (full_terms, full_gain))
    grad_terms, grad_gain = (
        None if x is None else torch.zeros(x.shape, dtype=x.dtype) for x in wanted
    )
    _C.backward(
        *_problem(q, k, v, full_terms, full_gain, form, scale, causal, window, plan, sequences),
        *map(_address, (o, lse, grad_o, grad_lse, grad_q, grad_k, grad_v, grad_terms, grad_gain)),
    )
    if grad_terms is not None:
        grad_terms = grad_terms.sum_to_size(terms.shape)
    if grad_gain is not None:
        grad_gain = grad_gain.sum_to_size(gain.shape)
    return grad_q, grad_k, grad_v, grad_terms, grad_gain


def trim(
    q: Tensor,
    k: Tensor,
    terms: Tensor | None,
    gain: Tensor | None,
    form: str,
    scale: float,
    causal: bool,
    window: int | None,
    plan: Tensor,
    near: Tensor,
    share: float,
    reach: int,
    from_end: bool,
) -> Tensor:
    """Where plan's ranges end if from_end, else begin, with more left out: (B, H, tiles) int32.

    For each query the exponentials of the logits of what goes sum to share * exp(near) at most, and
    its `reach` nearest past keys stay. Nothing goes where near, (B, H, Nq) like lse, is NaN.
    """
    terms, gain = _per_head(terms, q, form), _per_head(gain, q, form)
    near, cut = near.contiguous(), plan[int(from_end)].clone()
    _C.trim(
        *_problem(q, k, k, terms, gain, form, scale, causal, window, plan),
        *(_address(near), _address(cut), share, reach, from_end),
    )
    return cut


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    terms: Tensor | None,
    gain: Tensor | None,
    bounds: list[Tensor | None],
    form: str,
    scale: float,
    window: int | None,
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    """Returns o and lse as `forward` does; k, v, running sums and bounds are pages of a cache."""
    batch, heads, n_query, head_dim = q.shape
    _, kv_heads, page_size, value_dim = v.shape
    o = empty_rows(q, value_dim)
    lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    if form in ("linear", "distance"):  # tables are long: of these nothing is copied
        terms, peaks = (
            None if x is None else x.expand(*q.shape[:2], *x.shape[2:]) for x in (terms, bounds[3])
        )
        bounds = [*bounds[:3], peaks]
    gain = _per_head(gain, q, form)
    _C.decode(
        _DTYPE_NAMES[q.dtype],
        form,
        (batch, heads, kv_heads, n_query, 0, head_dim, value_dim),
        scale,
        _ENDLESS if window is None else window,
        tolerance,
        torch.get_num_threads(),
        (page_size, block_table.shape[1]),
        lengths.data_ptr(),
        block_table.data_ptr(),
        *map(_address, (q, k, v, terms, gain)),
        [_address(x) for x in bounds],
        _address(o),
        _address(lse),
    )
    return o, lse


def append(pages: Tensor, rows: Tensor, block_table: Tensor, lengths: Tensor) -> None:
    """Writes rows (B, heads, n, channels or nothing) into pages.

    They become the last of the keys of each sequence, of which there are `lengths`, (B,) int64.
    """
    channels = rows.shape[3] if rows.dim() == 4 else 1
    _C.append(
        rows.element_size(),
        (*rows.shape[:3], channels),
        (pages.shape[2], block_table.shape[1]),
        lengths.data_ptr(),
        block_table.data_ptr(),
        _address(rows),
        _address(pages),
    )


def _problem(q, k, v, terms, gain, form, scale, causal, window, plan, sequences=None):
    """The arguments that both directions share. Addresses do not keep tensors alive: callers do."""
    batch, heads, n_query, head_dim = q.shape
    _, kv_heads, n_key, value_dim = v.shape
    shift = 0
    first_key, end_key = (None, None) if plan is None else plan
    if sequences is not None:
        batch = sequences.rows.shape[0]
        n_query, n_key = sequences.longest_query, sequences.longest_key
        shift = sequences.longest_shift
    return (
        _DTYPE_NAMES[q.dtype],
        form,
        (batch, heads, kv_heads, n_query, n_key, head_dim, value_dim, shift),
        0 if sequences is None else sequences.rows.data_ptr(),
        scale,
        causal,
        n_key + shift if window is None else min(window, n_key + shift),
        torch.get_num_threads(),
        _address(q),
        _address(k),
        _address(v),
        _address(terms),
        1 if terms is None or terms.dim() == 2 else terms.shape[2],
        _address(gain),
        _address(first_key),
        _address(end_key),
    )


def _per_head(
    x: Tensor | None, q: Tensor, form: str, sequences: Sequences | None = None
) -> Tensor | None:
    """(B or 1, H or 1, n or nothing) with every head, contiguous along n.

    Slopes, and what rows have of their own, get every batch entry too; tables are shared.
    """
    if x is None:
        return None
    batch = q.shape[0]
    if form == "linear" and sequences is not None:
        batch = sequences.rows.shape[0]
    elif form == "distance":
        batch = x.shape[0]
    return x.contiguous().expand(batch, q.shape[1], *x.shape[2:])


def _address(x: Tensor | None) -> tuple[int, int, int, int] | None:
    """The address and the batch, head and sequence strides; one batch entry serves all."""
    if x is None:
        return None
    strides = x.stride()
    batch = 0 if x.shape[0] == 1 else strides[0]
    return x.data_ptr(), batch, strides[1], strides[2] if len(strides) > 2 else 1
