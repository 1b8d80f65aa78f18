"""The call of all layers: attention with a `TokenMask`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...attention import attend as attend_to
from ...attention import prepared
from .token_mask import TokenMask


def attend(mask: TokenMask, q: Tensor, k: Tensor, v: Tensor, bias, scale: float) -> Tensor:
    """Attention to the tokens, (B, Nq, H, Dv); outputs of padding queries are 0.

    q is (B, H, Nq, D), k (B, Hkv, Nk, D) and v (B, Hkv, Nk, Dv).

    Without a bias and a causal mask it may be cross-attention, so no query counts as padding.
    """
    _check_mask(mask, q, k)
    if mask.has_holes:
        return _packed(mask, q, k, v, bias, scale)
    return _padded(mask, q, k, v, bias, scale)[0]


def attend_with_lse(
    mask: TokenMask, q: Tensor, k: Tensor, v: Tensor, bias, scale: float, counted_by: str
) -> tuple[Tensor, Tensor]:
    """Like `attend`, with lse (B, Nq, H): 0 and -inf for padding queries.

    Raises NotImplementedError for padding between tokens, which counted_by explains.
    """
    _check_mask(mask, q, k)
    refuse_holes(mask, counted_by)
    return _padded(mask, q, k, v, bias, scale)


def _padded(mask: TokenMask, q, k, v, bias, scale: float) -> tuple[Tensor, Tensor]:
    sequences = None
    if mask.tokens is not None:
        sequences = mask.padded if mask.causal or bias is not None else mask.padded_keys
    options = (bias, mask.causal, mask.window, scale, None, None)
    o, lse = attend_to(prepared(q, k, v, *options, sequences=sequences))
    return o.transpose(1, 2), lse.transpose(1, 2)


def _packed(mask: TokenMask, q: Tensor, k: Tensor, v: Tensor, bias, scale: float) -> Tensor:
    if mask.window is not None:
        refuse_holes(mask, "a sliding window counts")
    packing = mask.packing
    taken = ((q, packing.queries), (k, packing.keys), (v, packing.keys))
    rows = (x.transpose(1, 2).flatten(0, 1)[row].transpose(0, 1)[None] for x, row in taken)
    options = (bias, mask.causal, None, scale, None, None)
    o, _ = attend_to(prepared(*rows, *options, sequences=packing.sequences))
    batch, heads, n_query, _ = q.shape
    padded = o.new_zeros(batch * n_query, heads, o.shape[3])
    padded = padded.index_copy(0, packing.queries, o[0].transpose(0, 1))
    return padded.unflatten(0, (batch, n_query))


def _check_mask(mask, q: Tensor, k: Tensor) -> None:
    if not isinstance(mask, TokenMask):
        got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise NotImplementedError(
            f"attention_mask has {got}; it must be (batch, tokens): pair masks are not supported"
        )
    # A mask that is not causal is created without knowledge of the keys.
    if (mask.n_query, mask.n_key) != (q.shape[2], k.shape[2]):
        raise ValueError(
            f"attention_mask is of {mask.n_key} keys and {mask.n_query} queries; it must be of"
            f" {k.shape[2]} keys and {q.shape[2]} queries"
        )


def refuse_holes(mask: TokenMask, counted_by: str) -> None:
    """Raises NotImplementedError for padding between tokens."""
    if mask.has_holes:
        raise NotImplementedError(
            f"attention_mask has padding between tokens, which {counted_by}; place the padding"
            " before or after the tokens"
        )


def check_dropout(module: torch.nn.Module, dropout: float) -> None:
    """Raises NotImplementedError for dropout of attention weights."""
    if module.training and dropout > 0:
        raise NotImplementedError(
            f"the attention dropout is {dropout}, which is not supported; for training, set"
            f" it to 0 in the model's {type(module).__name__} layers or in its config"
        )
