"""attention-gym, test/test_sandwich.py, test_graphormer.py and test_mods.py, and its ALiBi."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding

from biased_flash_attn import biased_flash_attn, biases

from .oracle import assert_within, attention, below_diagonal

PEER = ("attention-gym", "test/test_{sandwich,graphormer,mods}.py, attn_gym/mods/alibi.py")


@dataclass(frozen=True)
class Case:
    name: str
    refused: str = ""


def sandwich(heads: int, n: int, dbar: int = 128) -> Tensor:
    """Inner products of sinusoidal embeddings over the ratio 8 h / H, (heads, n, n) float64."""
    rates = 10000 ** -(torch.arange(0, dbar, 2, dtype=torch.float64) / dbar)
    angles = torch.arange(n)[:, None] * rates
    embeddings = torch.cat([angles.sin(), angles.cos()], 1)
    ratios = 8 * torch.arange(1, heads + 1, dtype=torch.float64) / heads
    return embeddings @ embeddings.T / ratios[:, None, None]


def check_products_of_embeddings() -> None:
    """Up to a constant of each head, the value at distance 0, to which softmax is invariant."""
    bias = biases.Sandwich(8, first_frequency=0).dense(64, 64)
    ours, exact = (x - x[:, :1, :1] for x in (bias, sandwich(8, 64)))
    torch.testing.assert_close(ours, exact, rtol=0, atol=1e-10)


def check_sandwich(n: int, dtype: torch.dtype, atol: float) -> None:
    inputs = [torch.randn(2, 8, n, 64).to(dtype) for _ in range(3)]
    added = sandwich(8, n) + below_diagonal(n, n, 0)
    bias = biases.Sandwich(8, first_frequency=0)
    assert_within(
        lambda q, k, v: biased_flash_attn(q, k, v, bias),
        lambda q, k, v: attention(q, k, v, added, 1 / 8),
        inputs,
        factor=0,
        atol=atol,
        rtol=atol,
        gradients=dtype == torch.float32,
    )


def check_alibi(causal: bool) -> None:
    """The factor of a slope is j - i, which is positive for keys after the query."""
    heads, n = 6, 12
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)
    added = slopes[:, None, None] * (torch.arange(n) - torch.arange(n)[:, None])
    added = added + below_diagonal(n, n, 0 if causal else n)
    bias = biases.ALiBi(heads, slopes="geometric")
    if not causal:
        bias = biases.DistanceBias.from_function(lambda d: -slopes[:, None] * d, heads, signed=True)
    assert_within(
        lambda q, k, v: biased_flash_attn(q, k, v, bias, causal=causal),
        lambda q, k, v: attention(q, k, v, added, 1 / math.sqrt(8)),
        [torch.randn(1, heads, n, 8) for _ in range(3)],
        factor=2,
        atol=1e-5,
    )


def check_graphormer(spatial: bool, edges: bool) -> None:
    """Tables that are read at the distances of pairs in a graph, and averaged over the types of the
    edges between them."""
    batch, heads, n, reach, types, longest = 2, 4, 128, 5, 3, 4
    distances = torch.randint(0, reach + 2, (batch, n, n))
    kinds = torch.randint(0, types, (batch, n, n, longest))
    on_path = torch.arange(longest) < distances.clamp(max=longest)[..., None]

    def added(of_distance: Tensor, of_edges: Tensor) -> Tensor:
        # The gradient of advanced indexing would depend on the scheduling of threads.
        pairs = torch.zeros(batch, n, n, heads, dtype=of_distance.dtype)
        if spatial:
            pairs = embedding(distances, of_distance.mT)
        if edges:
            place_and_kind = types * torch.arange(longest) + kinds
            values = embedding(place_and_kind, of_edges.flatten(1).mT) * on_path[..., None]
            pairs = pairs + values.sum(-2) / on_path.sum(-1, keepdim=True).clamp(min=1)
        return pairs.permute(0, 3, 1, 2)

    qkv = [torch.randn(batch, heads, n, 64) for _ in range(3)]
    tables = [torch.randn(heads, reach + 2), torch.randn(heads, longest, types)]
    assert_within(
        lambda q, k, v, *t: biased_flash_attn(q, k, v, biases.DenseBias(added(*t)), causal=False),
        lambda q, k, v, *t: attention(q, k, v, added(*t), 1 / 8),
        qkv + tables,
        factor=2,
        atol=1e-5,
    )


CHECKS = {
    "sandwich: bias": check_products_of_embeddings,
    "sandwich: gradients": partial(check_sandwich, 256, torch.float32, 2e-3),
    "sandwich: bfloat16": partial(check_sandwich, 512, torch.bfloat16, 2e-2),
    "alibi: causal": partial(check_alibi, True),
    "alibi: both sides": partial(check_alibi, False),
    "graphormer: spatial": partial(check_graphormer, True, False),
    "graphormer: edges": partial(check_graphormer, False, True),
    "graphormer: spatial and edges": partial(check_graphormer, True, True),
}
CASES = [
    *map(Case, CHECKS),
    Case("tanh softcap", "capped logits"),
]


@pytest.mark.parametrize("name", CHECKS)
def test_biases(name):
    CHECKS[name]()


def test_capped_logits_are_refused():
    q = torch.randn(1, 1, 128, 64)
    with pytest.raises(TypeError, match="'softcap': logits are not capped; a bias is added"):
        biased_flash_attn(q, q, q, softcap=30.0)
