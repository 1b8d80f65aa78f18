"""Under autocast, q, k and v are cast, and nothing that a bias is computed from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from biased_flash_attn import (
    KVCache,
    biased_flash_attn,
    biased_flash_attn_varlen,
    biased_flash_attn_with_kvcache,
    biases,
)
from biased_flash_attn.nn.named_biases import applied, make

HEADS, HEAD_DIM, N = 2, 8, 12
DIM = HEADS * HEAD_DIM


class Network(nn.Module):
    """A function of the distance whose products autocast would compute in bfloat16."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, HEADS))

    def forward(self, d: Tensor) -> Tensor:
        return 3 * self.layers(d[:, None].float() / 5).mT


BIASES = {
    **{name: lambda name=name: make(biases.NAMED[name], HEADS, DIM) for name in biases.NAMED},
    "function": lambda: biases.DistanceBias.from_function(Network(), HEADS),
    "normalized": lambda: biases.NormalizedBias.from_function(Network(), HEADS, error=0.1),
}
every_bias = pytest.mark.parametrize("name", BIASES)


def drawn(name: str) -> tuple:
    """The bias, and the float32 arguments of attention with it, which autocast casts."""
    bias = BIASES[name]().requires_grad_(False)
    for x in bias.parameters():
        x += 0.3 * torch.randn_like(x)  # tables have larger values than initially
    q, k, v = torch.randn(3, 1, HEADS, N, HEAD_DIM)
    return bias, torch.randn(1, N, DIM), q, k, v


def with_and_without(call, *tensors: Tensor) -> None:
    """The call under autocast equals that of bfloat16 tensors."""
    narrow = [x.bfloat16() for x in tensors]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = call(*tensors)
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual, call(*narrow))


@every_bias
def test_biases_are_not_cast(name):
    bias, x, q, k, v = drawn(name)
    q, form, scale = applied(bias, x, q, k, torch.arange(N))
    with_and_without(lambda q, k, v: biased_flash_attn(q, k, v, form, scale=scale), q, k, v)


@every_bias
def test_biases_of_packed_sequences_are_not_cast(name):
    bias, x, q, k, v = drawn(name)
    q, form, scale = applied(bias, x, q, k, torch.arange(N))
    offsets = torch.tensor([0, 5, N], dtype=torch.int32)
    with_and_without(
        lambda *packed: biased_flash_attn_varlen(
            *packed, offsets, offsets, form, max_seqlen_q=7, max_seqlen_k=7, scale=scale
        ),
        *(y[0].transpose(0, 1) for y in (q, k, v)),
    )


@every_bias
def test_biases_of_decoding_are_not_cast(name):
    bias, x, q, k, v = drawn(name)
    steps = [slice(n, n + 4) for n in range(0, N, 4)]
    forms = [bias(x[:, rows], q[:, :, rows], k[:, :, rows]) for rows in steps]

    def decoded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = KVCache(1, HEADS, HEAD_DIM, dtype=torch.bfloat16)
        new = [[y[:, :, rows] for y in (q, k, v)] for rows in steps]
        results = [
            biased_flash_attn_with_kvcache(q, cache, k, v, form)
            for (q, k, v), form in zip(new, forms, strict=True)
        ]
        return torch.cat(results, 2)

    with_and_without(decoded, q, k, v)


@pytest.mark.parametrize("name", ["function", "transformer_xl", "disentangled"])
def test_compiled_biases_are_not_cast(name):
    bias, x, q, k, v = drawn(name)
    form = bias(x, q, k)
    call = torch.compile(biased_flash_attn, fullgraph=True, backend="aot_eager")
    with_and_without(lambda q, k, v: call(q, k, v, form), q, k, v)
