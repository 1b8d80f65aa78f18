"""Receptive fields of trained models by gradients and attention weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from biased_flash_attn import biases
from biased_flash_attn.extrapolation import (
    attention_mass,
    attention_masses,
    attention_weights,
    cumulative_gradient,
    empirical_receptive_field,
)
from biased_flash_attn.nn import BASELINES, CausalLM, Encoder, Positions
from tests.support.numerics import assert_close_to_float64

HEADS, DIM, VOCABULARY = 4, 24, 19


def causal_lm(scheme: str | Positions, layers: int = 2) -> CausalLM:
    model = CausalLM(VOCABULARY, DIM, layers, HEADS, scheme, kv_heads=2, max_length=64).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("scheme", [*biases.NAMED, *BASELINES, "window(5)"])
def test_cumulative_gradient_equals_sums_of_jacobian_norms(scheme):
    model, tokens = causal_lm(scheme), torch.randint(VOCABULARY, (2, 13))
    embedding = model.embedding.tokens
    exact = []
    for sequence in tokens:

        def predicted(x, sequence=sequence):
            hook = embedding.register_forward_hook(lambda *_: x)
            logits = model(sequence[None])[0, -1].float()
            hook.remove()
            return logits.log_softmax(-1).max()

        jacobian = torch.autograd.functional.jacobian(predicted, embedding(sequence[None]))[0]
        norms = [math.sqrt(math.fsum(g * g for g in row)) for row in jacobian.tolist()]
        recent = norms[::-1]
        exact.append([math.fsum(recent[: m + 1]) / math.fsum(norms) for m in range(13)])
    curves = cumulative_gradient(model, tokens, progress=False)
    exact = torch.tensor(exact, dtype=torch.float64)  # sums of positive numbers
    assert_close_to_float64(curves, exact, None, scheme, exact)


@pytest.mark.parametrize(("layers", "window"), [(1, 1), (1, 5), (2, 4), (3, 3), (4, 2)])
def test_a_windowed_model_has_no_gradient_beyond_its_windows(layers, window):
    """Each of R layers adds w - 1 tokens, so that at most w R have an effect."""
    model = causal_lm(f"window({window})", layers)
    curves = cumulative_gradient(model, torch.randint(VOCABULARY, (3, 40)), progress=False)
    reach = layers * (window - 1) + 1
    assert reach <= layers * window
    assert (curves[:, reach - 1 :] == curves[:, -1:]).all()
    assert (curves[:, -1] - 1).abs().max() < 1e-12
    if reach > 1:
        assert (curves[:, reach - 2] < curves[:, -1]).all()
    assert (empirical_receptive_field(curves) <= reach).all()


def test_embeddings_as_inputs_give_the_same_gradients():
    model, tokens = causal_lm("alibi"), torch.randint(VOCABULARY, (2, 9))

    class FromEmbeddings(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for block in model.blocks:
                x = block(x)
            return model.head(model.norm(x))

    by_tokens = cumulative_gradient(model, tokens, progress=False)
    embedded = model.embedding(tokens)
    by_embeddings = cumulative_gradient(FromEmbeddings(), embedded, progress=False)
    named = cumulative_gradient(model, tokens, embedding=model.embedding, progress=False)
    assert torch.equal(by_tokens, by_embeddings)
    assert torch.equal(by_tokens, named)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_receptive_field_is_the_smallest_sufficient_count():
    curves = [[0.5, 0.98, 0.99, 0.995, 1.0], [0.991, 1, 1, 1, 1], [0.1, 0.1, 0.1, 0.1, 1]]
    curves = torch.tensor(curves, dtype=torch.float64)
    assert empirical_receptive_field(curves).tolist() == [4, 1, 5]
    assert empirical_receptive_field(curves, 0.4).tolist() == [1, 1, 5]


def shortest(weights: list[float], eps: float) -> int:
    """The smallest number of last entries that sum to more than 1 - eps of the total."""
    total = math.fsum(weights)
    return next(
        n for n in range(1, len(weights) + 1) if math.fsum(weights[-n:]) > (1 - eps) * total
    )


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("entries", [2**22, 300], ids=["one block", "blocks of queries"])
@pytest.mark.parametrize(
    "name", ["alibi", "kerple_log", "cable", "kernelized_cable", "relative", "none"]
)
def test_attention_mass_is_the_smallest_count_of_nearest_keys(name, entries, window, monkeypatch):
    monkeypatch.setattr("biased_flash_attn.extrapolation.attention_weights.ENTRIES", entries)
    n_query, n_key = 17, 23
    x = torch.randn(2, n_key, DIM)
    q, k = 2 * torch.randn(2, HEADS, n_query, 8), torch.randn(2, 2, n_key, 8)
    bias = None
    if name in biases.CONTEXT_BIASES:
        bias = biases.CONTEXT_BIASES[name](DIM, HEADS)(x)
    elif name == "relative":
        factors = torch.randn(2, HEADS, n_query, 3), torch.randn(2, HEADS, n_key, 3)
        bias = biases.RelativeBias(
            factors[0], torch.randn(HEADS, 3, 9), factors[1], torch.randn(1, 3, 9), beyond="last"
        )
    elif name != "none":
        bias = biases.DISTANCE_BIASES[name](HEADS)
    eps = 0.01 + 0.4 * torch.rand(()).item()
    logits = (q.double() @ k.double().repeat_interleave(2, 1).mT) / math.sqrt(8)
    if bias is not None:
        logits = logits + bias.dense(n_query, n_key)
    fields = attention_mass(q, k, bias, eps, window=window)
    for b in range(2):
        for h in range(HEADS):
            for i in range(n_query):
                end = i + n_key - n_query + 1
                first = 0 if window is None else max(0, end - window)
                weights = logits[b, h, i, first:end].exp().tolist()
                assert fields[b, h, i] == shortest(weights, eps)


def test_attention_masses_are_those_of_each_layer():
    model, tokens = causal_lm("cable"), torch.randint(VOCABULARY, (2, 21))
    found = attention_masses(model, tokens, 0.1)
    assert list(found) == ["blocks.0.attention.fused", "blocks.1.attention.fused"]
    x = model.embedding(tokens)
    for block, field in zip(model.blocks, found.values(), strict=True):
        layer, states = block.attention, block.norms[0](x)
        heads = layer.project(states).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
        q, k, _ = heads.split((HEADS, 2, 2), 1)
        assert torch.equal(field, attention_mass(q, k, layer.bias(states), 0.1))
        x = block(x)


def test_attention_masses_are_those_of_the_layers_own_scale():
    class Scaled(biases.Bias):
        scale = 5.0

        def forward(self, x=None, q=None, k=None) -> None:
            return None

    scheme = Positions(bias=lambda heads, dim: Scaled())
    model, tokens = causal_lm(scheme, layers=1), torch.randint(VOCABULARY, (2, 21))
    layer, states = model.blocks[0].attention, model.blocks[0].norms[0](model.embedding(tokens))
    heads = layer.project(states).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
    q, k, _ = heads.split((HEADS, 2, 2), 1)
    exact = attention_mass(q, k, None, 0.1, scale=5.0)
    assert torch.equal(*attention_masses(model, tokens, 0.1).values(), exact)
    assert not torch.equal(exact, attention_mass(q, k, None, 0.1))


def test_attention_mass_of_equal_products_is_the_receptive_field():
    bias, n_key = biases.ALiBi(HEADS, shift=-2), 3000
    field = attention_mass(torch.zeros(1, HEADS, 1, 8), torch.zeros(1, HEADS, n_key, 8), bias, 0.01)
    assert field[0, :, 0].tolist() == bias.receptive_field(0.01).tolist()


def test_memory_is_proportional_to_the_length():
    def entries(n: int) -> int:
        q = torch.zeros(1, 1, n, 8)
        sizes = []

        class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                sizes.extend(
                    t.numel()
                    for t in (out if isinstance(out, tuple) else (out,))
                    if isinstance(t, Tensor)
                )
                return out

        with Sizes():
            attention_mass(q, q, biases.Type1(1))
        return max(sizes)

    assert entries(6000) <= attention_weights.ENTRIES + 6000


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: cumulative_gradient(causal_lm("none"), torch.ones(3).long()), TypeError, "inputs"),
        (
            lambda: cumulative_gradient(nn.Linear(2, 2), torch.ones(1, 3).long()),
            ValueError,
            "embedding is None, and model has no nn.Embedding",
        ),
        (
            lambda: cumulative_gradient(
                causal_lm("none"), torch.ones(1, 3).long(), embedding=nn.Embedding(3, 3)
            ),
            ValueError,
            "embedding was called 0 times",
        ),
        (lambda: empirical_receptive_field(torch.ones(1, 3), 1), ValueError, "share is 1; it must"),
        (
            lambda: attention_mass(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 2, 4)),
            ValueError,
            "q has 3 queries; it may have as many as k has keys, 2",
        ),
        (
            lambda: attention_mass(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), eps=0),
            ValueError,
            "eps is 0; it must",
        ),
        (
            lambda: attention_masses(nn.Linear(2, 2), torch.ones(1, 3, 2)),
            ValueError,
            "model has no nn.FusedAttention",
        ),
        (
            lambda: attention_masses(Encoder(9, 8, 1, 2), torch.ones(1, 3).long()),
            ValueError,
            "model is bidirectional",
        ),
    ],
)
def test_invalid_arguments_are_refused(call, error, message):
    with pytest.raises(error, match="^" + message):
        call()
