"""The functions of logits in FlashAttention 4's tests, by their formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NONLINEAR = "a nonlinear function of the logits"
FACTORS = "factors of the logits that differ among heads"


@dataclass(frozen=True)
class Pairs:
    """Indices that broadcast to all pairs of a sequence, of a batch or of packed sequences."""

    b: Tensor
    h: Tensor
    i: Tensor
    j: Tensor
    query: Tensor  # the index among the queries of all sequences
    key: Tensor

    @property
    def d(self) -> Tensor:
        return (self.i - self.j).double()


@dataclass(frozen=True)
class Mod:
    """A function of logits that is a factor of them and a bias.

    bias: what is added to the logits, from the indices and from buffers. distance: the same as a
    function of i - j for a number of heads, if it is one. buffers: what these are indexed by.
    """

    bias: Callable[..., Tensor]
    distance: Callable[[Tensor, int], Tensor] | None = None
    buffers: tuple[str, ...] = ()
    factor: float = 1.0
    causal: bool = False
    refused: str = ""


def masked(visible: Tensor) -> Tensor:
    return torch.where(visible, 0.0, -torch.inf).double()


def slopes(h: Tensor) -> Tensor:
    return 2.0 ** -(h + 1)


def refused(reason: str) -> Mod:
    return Mod(lambda p: p.d, refused=reason)


CAUSAL = Mod(lambda p: masked(p.i >= p.j), causal=True)
PER_KEY = Mod(lambda p, token: token[p.key], buffers=("key",))
MODS = {
    "identity": Mod(lambda p: 0 * p.d, lambda d, heads: 0 * d),
    "causal": CAUSAL,
    "rel_bias": Mod(lambda p: p.d.abs(), lambda d, heads: d.abs()),
    "rel_bias_x2": Mod(lambda p: 2 * p.d.abs(), lambda d, heads: 2 * d.abs()),
    "rel_bias_clamped": Mod(
        lambda p: p.d.abs().clamp(max=256), lambda d, heads: d.abs().clip(0, 256)
    ),
    "times_two": Mod(lambda p: 0 * p.d, factor=2.0),
    "alibi": Mod(
        lambda p: -slopes(p.h) * p.d.abs(),
        lambda d, heads: -slopes(torch.arange(heads))[:, None] * d.abs(),
    ),
    "sliding_window": Mod(lambda p: masked(p.d.abs() <= 256)),
    "block_diagonal": Mod(lambda p: masked(p.i // 64 == p.j // 64)),
    "causal_v2": CAUSAL,
    "batch_bias": Mod(lambda p, batch: batch[p.b], buffers=("batch",)),
    "dual_buffer": Mod(lambda p, head, pos: head[p.h] + pos[p.i], buffers=("head", "position")),
    "squared": refused(NONLINEAR),
    "scaled_squared": refused(NONLINEAR),
    "global_kv_bias": PER_KEY,
    "global_q_bias": Mod(lambda p, token: token[p.query], buffers=("query",)),
    "global_rel_plus_kv_bias": Mod(
        lambda p, token: 0.1 * p.d.abs() + token[p.key], buffers=("key",)
    ),
    "global_q_and_kv_bias": Mod(
        lambda p, of_query, of_key: of_query[p.query] + of_key[p.key], buffers=("query", "key")
    ),
    "global_logical_rel_plus_kv_bias": Mod(
        lambda p, token: 0.01 * p.d.abs() + token[p.key], buffers=("key",)
    ),
    "stress_complex_arithmetic": Mod(
        lambda p, token: 0.001 * (p.d.abs() + (p.b + 1) * (p.h + 1) * token[p.query]),
        buffers=("query",),
    ),
    "stress_conditional_mask": Mod(
        lambda p, token: token[p.key] + masked((p.i >= p.j) & ((p.query - p.key).abs() <= 512)),
        buffers=("key",),
    ),
    "stress_multi_buffer": refused(FACTORS),
    "stress_global_offset": PER_KEY,
    "stress_xor_pattern": Mod(
        lambda p, token: 0.001 * ((p.i ^ p.j) & 255).double() + 0.1 * token[p.key],
        buffers=("key",),
    ),
    "debug_global_idx": Mod(lambda p: 0.001 * p.key.double()),
}
