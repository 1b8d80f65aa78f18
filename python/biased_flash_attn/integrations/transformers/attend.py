"""The call of all layers: attention with a `TokenMask`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...attention import attend as attend_to
from ...attention import lowered, prepared
from ...biases import DenseBias
from ...geometry import Geometry
from ...problem import Problem
from .token_mask import Packing, TokenMask


class Attended(NamedTuple):
    """Results for the queries: o (B, Nq, H, Dv), lse (B, Nq, H), and the attention weights
    (B, H, Nq, Nk) where they are asked for. They are 0, -inf and 0 for padding queries."""

    o: Tensor
    lse: Tensor
    weights: Tensor | None


def attend(
    mask: TokenMask,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias,
    scale: float,
    *,
    counts_padding: bool = False,
    with_weights: bool | None = False,
) -> Attended:
    """Attention to the tokens, in O(N) memory.

    q is (B, H, Nq, D), k (B, Hkv, Nk, D) and v (B, Hkv, Nk, Dv). Without a bias and a causal mask
    it may be cross-attention, so no query counts as padding.

    Padding between tokens is removed before the call. Distances of a bias with counts_padding, and
    those of a window, include it; the bias is then expanded to all pairs, in O(N^2) memory. So are
    the weights, if with_weights is true.
    """
    check_mask(mask, q.shape[2], k.shape[2])
    sequences = packing = None
    if not mask.has_holes:
        sequences = mask.sequences(of_one_input=mask.causal or bias is not None)
    elif counts_padding or mask.window is not None:
        bias = _of_pairs(bias, mask, q)
    else:
        packing = mask.packing
        sequences = packing.sequences
        q, k, v = (
            rows.pack(x.transpose(1, 2)).transpose(1, 2)
            for x, rows in ((q, packing.queries), (k, packing.keys), (v, packing.keys))
        )
    options = (bias, mask.causal, mask.window, scale, None, None)
    problem = prepared(q, k, v, *options, sequences=sequences)
    o, lse = attend_to(problem)
    weights = _weights(problem, lse, mask, packing) if with_weights else None
    o, lse = o.transpose(1, 2), lse.transpose(1, 2)
    if packing is not None:
        o, lse = packing.queries.unpack(o), packing.queries.unpack(lse, -torch.inf)
    return Attended(o, lse, weights)


def _of_pairs(bias, mask: TokenMask, q: Tensor) -> DenseBias:
    """The bias of every pair, -inf for keys that are padding."""
    geometry = Geometry(mask.n_query, mask.n_key, mask.causal, mask.window)
    real = torch.promote_types(q.dtype, torch.float32)
    pairs = lowered(bias, q, geometry).dense(geometry).to(real)
    return DenseBias(torch.where(mask.tokens[:, None, None], pairs, -torch.inf))


def _weights(problem: Problem, lse: Tensor, mask: TokenMask, packing: Packing | None) -> Tensor:
    """The weights of all pairs, 0 where the query or the key is padding."""
    if problem.sequences is None:
        return _weights_of(problem, lse)
    batch = problem.batch
    weights = problem.q.new_zeros(batch, problem.q.shape[1], mask.n_query, mask.n_key)
    queries, keys = (torch.arange(n, device=lse.device) for n in (lse.shape[2], problem.k.shape[2]))
    if packing is not None:
        queries, keys = packing.queries.index % mask.n_query, packing.keys.index % mask.n_key
    for rows, one in zip(problem.sequences, problem.each_sequence(), strict=True):
        i = queries[rows.first_query :][: rows.n_query, None]
        j = keys[rows.first_key :][: rows.n_key]
        own = rows.queries(lse[..., None])[..., 0]
        weights[rows.entry][:, i, j] = _weights_of(one, own)[0]
    return weights


def _weights_of(problem: Problem, lse: Tensor) -> Tensor:
    """exp(s - lse), for one sequence or without padding."""
    real = problem.real
    k = problem.k.repeat_interleave(problem.q.shape[1] // problem.k.shape[1], 1)
    s = problem.scale * (problem.q.to(real) @ k.to(real).mT)
    s = s + problem.form.dense(problem.geometry).to(real)
    s = s.where(problem.geometry.visible(s.device), -torch.inf)
    # A query that sees no key has lse = -inf.
    lse = lse.where(lse > -torch.inf, 0)
    return torch.exp(s - lse[..., None]).to(problem.q.dtype)


def check_mask(mask, n_query: int, n_key: int) -> None:
    """Raises an error unless it is a `TokenMask` of these lengths.

    A mask that is not causal is created without knowledge of the keys.
    """
    if not isinstance(mask, TokenMask):
        got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise NotImplementedError(
            f"attention_mask has {got}; it must be (batch, tokens): pair masks are not supported"
        )
    if (mask.n_query, mask.n_key) != (n_query, n_key):
        raise ValueError(
            f"attention_mask is of {mask.n_key} keys and {mask.n_query} queries; it must be of"
            f" {n_key} keys and {n_query} queries"
        )


def check_dropout(module: torch.nn.Module, dropout: float) -> None:
    """Raises NotImplementedError for dropout of attention weights."""
    if module.training and dropout > 0:
        raise NotImplementedError(
            f"the attention dropout is {dropout}, which is not supported; for training, set"
            f" it to 0 in the model's {type(module).__name__} layers or in its config"
        )
