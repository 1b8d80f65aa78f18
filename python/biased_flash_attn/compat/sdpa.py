"""PyTorch's scaled_dot_product_attention, with a position bias in place of a dense mask."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..attention import attend, prepared
from ..autocast import under_autocast
from ..biases import DenseBias
from ..sequences import Sequences
from ..validation import check_each, check_heads
from .arguments import check_dropout, contiguous_rows


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    bias=None,
) -> Tensor:
    """`biased_flash_attn` with the signature of torch.nn.functional.scaled_dot_product_attention.

    With is_causal, query i has position i, as in PyTorch: it sees the keys j <= i, and its distance
    to key j is i - j, for any numbers of queries and keys. Without is_causal, where PyTorch
    has no positions, the last query is aligned with the last key, as in `biased_flash_attn`. Both
    are equivalent for equal numbers of queries and keys; for decoding, is_causal is False.

    Differences from PyTorch:

    - attn_mask may be combined with is_causal. A bool mask of keys, the same for all queries and
      heads, takes O(S) memory and is combined with a bias. Like a mask that is added to the logits,
      a bool mask of pairs takes O(L S) memory, and replaces the bias.
    - Dropout is not supported.

    Args:
        query: (..., heads, L, E), any number of leading dimensions, or none. It is copied if its
            last dimension is not contiguous.
        key: (..., kv_heads, S, E), with the same leading dimensions.
        value: (..., kv_heads, S, Ev).
        attn_mask: None; or floating point, added to the logits after scaling, any shape that
            broadcasts to (..., heads, L, S), in the dtype of query or float32, not copied; or bool
            with True for pairs that take part, in such a shape. If it is (..., 1, 1, S), or
            broadcasts to it from the left, it is a mask of keys. These must be contiguous, with
            padding before or after them. Padding is never read and does not change positions; the
            output of a query that sees no key is 0.
        dropout_p: 0.
        is_causal: whether query i sees only the keys j <= i.
        scale: factor of q k^T, 1 / sqrt(E) by default.
        enable_gqa: whether kv_heads may be a divisor of heads; otherwise they must be equal.
        bias: a bias of `biased_flash_attn.biases`, or None. Its batch comprises all leading
            dimensions. Biases that sum steps have steps for S positions or, with is_causal, for
            max(L, S). `RelativeBias` has key_factors for the keys that are visible: with is_causal,
            for the first min(L, S).

    Returns:
        (..., heads, L, Ev) in the dtype of query.

    Raises:
        TypeError, ValueError: naming the argument, its value and the permitted values.
    """
    check_dropout(dropout_p)
    query, key, value = (contiguous_rows(x) for x in under_autocast(query, key, value))
    _check_shapes(query, key, value, enable_gqa)
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal is {is_causal!r}; it must be True or False")
    mask = None
    if isinstance(attn_mask, Tensor) and (attn_mask.is_floating_point() or _is_of_pairs(attn_mask)):
        bias = _added(attn_mask, bias, query, key, is_causal)
    elif attn_mask is not None:
        mask = _mask_of_keys(attn_mask, query, key)
    if hasattr(bias, "with_places"):
        sizes = query.shape[-2], key.shape[-2]
        places, end = max(sizes) if is_causal else sizes[1], _end(query, key, is_causal)
        bias = bias.with_places(places, end, *sizes, padded=mask is not None)
    if is_causal:  # later keys are not visible
        n_query = query.shape[-2]
        key, value = key[..., :n_query, :], value[..., :n_query, :]
        mask = None if mask is None else mask[:, :n_query]
    q, k, v = (_as_batch(x) for x in (query, key, value))
    sequences = _sequences(q, k, is_causal, mask)
    # This window hides nothing, but limits the bias to distances that occur.
    window = None if sequences is None else max(1, _end(q, k, is_causal))
    problem = prepared(q, k, v, bias, is_causal, window, scale, None, None, sequences=sequences)
    o, _ = attend(problem)
    return o.reshape(*query.shape[:-1], o.shape[-1])


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    tensors = {"query": query, "key": key, "value": value}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
        if x.dim() < 2 or x.dim() != query.dim() or x.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; it must be (..., heads, sequence, head_dim),"
                " the first dimensions those of query"
            )
    q, k, v = (_as_batch(x) for x in tensors.values())
    check_each(dict(zip(tensors, (q, k, v), strict=True)))
    check_heads(q, k, names=("query", "key"))
    if not enable_gqa and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"key has {k.shape[1]} heads and query {q.shape[1]}; these must be the same, or"
            " enable_gqa True"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"value has shape {tuple(value.shape)}; all but its head_dim must be as in key,"
            f" {tuple(key.shape)}"
        )


def _as_batch(x: Tensor) -> Tensor:
    """(..., heads, n, channels) to (batch, heads, n, channels); heads may be missing too."""
    return x[(None,) * (4 - x.dim())].flatten(0, -4)


def _is_of_pairs(attn_mask: Tensor) -> bool:
    """Whether it masks keys of some queries or heads only."""
    return attn_mask.dtype == torch.bool and any(n != 1 for n in attn_mask.shape[-3:-1])


def _mask_of_keys(attn_mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """(batch, n_key) bool, True for keys that take part."""
    name, n_key = "attn_mask", key.shape[-2]
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"{name} is a {type(attn_mask).__name__}; it must be None or a tensor")
    if attn_mask.dtype != torch.bool:
        raise TypeError(
            f"{name} is {attn_mask.dtype}; it must be torch.bool, True for keys that take part, or"
            " floating point, added to logits"
        )
    expected = (*query.shape[:-3], 1, 1, n_key)
    missing = len(expected) - attn_mask.dim()
    shape = (1,) * missing + tuple(attn_mask.shape)
    if missing < 0 or any(n not in (1, m) for n, m in zip(shape, expected, strict=True)):
        raise ValueError(
            f"{name} has shape {tuple(attn_mask.shape)}; it must mask keys for all queries and"
            f" heads and broadcast to {expected}"
        )
    if attn_mask.device != query.device:
        raise ValueError(
            f"{name} is on {attn_mask.device}; it must be on the device of query, {query.device}"
        )
    return attn_mask.expand(expected).flatten(0, -2)


def _added(attn_mask: Tensor, bias, query: Tensor, key: Tensor, is_causal: bool) -> DenseBias:
    """The bias for a mask of pairs: a floating point one is added to the logits."""
    if bias is not None:
        raise ValueError(
            "bias is given with an attn_mask of pairs; pass the sum of what both add to logits"
        )
    n_query, n_key = query.shape[-2], key.shape[-2]
    expected = (*query.shape[:-2], n_query, n_key)
    missing = query.dim() - attn_mask.dim()
    shape = (1,) * missing + tuple(attn_mask.shape)
    if missing < 0 or any(n not in (1, m) for n, m in zip(shape, expected, strict=True)):
        raise ValueError(
            f"attn_mask has shape {tuple(attn_mask.shape)}; it must broadcast to {expected}"
        )
    added = attn_mask.view(shape).expand(*shape[:-2], n_query, n_key)
    if query.dim() > 4 and any(n > 1 for n in shape[:-3]):
        added = added.expand(*query.shape[:-3], *added.shape[-3:])
    if is_causal:
        added = added[..., :n_query]
    return DenseBias(_as_batch(added))


def _end(query: Tensor, key: Tensor, is_causal: bool) -> int:
    """The position after that of the last query."""
    return query.shape[-2] if is_causal else key.shape[-2]


def _sequences(q: Tensor, k: Tensor, is_causal: bool, mask: Tensor | None) -> Sequences | None:
    """The sequences of calls whose last query is not aligned with the last key."""
    (batch, _, n_query, _), n_key = q.shape, k.shape[2]
    end = _end(q, k, is_causal)
    if mask is not None:
        tokens = Sequences.from_mask(mask, n_key, "attn_mask")
        first, count = tokens.rows[:, 2], tokens.rows[:, 3]
        queries = torch.zeros_like(first), torch.full_like(first, n_query)
        rows = torch.stack([*queries, first, count, end - first - count], 1)
        return replace(
            tokens, rows=rows, longest_query=n_query, query_rows=n_query, longest_shift=end
        )
    if end == n_key:
        return None
    return Sequences.from_entries(batch, n_query, n_key, q.device).shifted(end - n_key, end - n_key)
