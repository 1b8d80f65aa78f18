"""Layers and models: plain attention, cached steps, bidirectional models, and errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from biased_flash_attn import biases
from biased_flash_attn.biases.layers import NormalEmbedding
from biased_flash_attn.nn import (
    BiasedAttention,
    CausalLM,
    Encoder,
    positions,
)
from tests.nn.models import (
    DIM,
    HEADS,
    KV_HEADS,
    SCHEMES,
    TWO_SIDED,
    VOCABULARY,
    causal_lm,
    encoder,
    larger,
    with_terms,
)
from tests.support import oracles
from tests.support.numerics import assert_close_to_float64


class Quadratic(biases.DistanceBias):
    """A custom bias, given by its path."""

    def formula(self, d: Tensor) -> Tensor:
        return -0.01 * d**2


class Gate(biases.Bias):
    """A custom bias of hidden states."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.linear = nn.Linear(dim, num_heads)

    def forward(self, x=None, q=None, k=None) -> biases.CumulativeBias:
        return biases.CumulativeBias(-self.linear(x).mT.square())


def written_out(layer: BiasedAttention, x: Tensor, causal: bool) -> Tensor:
    """The layer in plain PyTorch, one head at a time, for one sequence (N, DIM)."""
    n, head_dim = x.shape[0], layer.head_dim
    q, k, v = layer.project(x).split([HEADS * head_dim, *[KV_HEADS * head_dim] * 2], -1)
    d = torch.arange(n)[:, None] - torch.arange(n)
    visible = d >= 0 if causal else torch.ones_like(d, dtype=torch.bool)
    if layer.window is not None:
        visible = visible & (d < layer.window)
    dense = torch.zeros(HEADS, n, n, dtype=x.dtype)
    u = torch.zeros(HEADS, head_dim, dtype=x.dtype)
    scale = 1 / math.sqrt(head_dim)
    if isinstance(layer.bias, biases.Cable):
        parameters = dict(layer.bias.named_parameters())
        entry = oracles.cable(
            weighted=layer.bias.w_s is not None, kernel=layer.bias.kernel is not None
        )
        dense = oracles.every_pair(lambda h, p, j: entry(parameters, x, h, p, j), HEADS, n, n)
    elif layer.bias is not None:
        of_heads = (t.unflatten(-1, (-1, head_dim)).transpose(0, 1)[None] for t in (q, k))
        dense = layer.bias(x[None], *of_heads).dense(n, n).expand(1, HEADS, n, n)[0]
        u = getattr(layer.bias, "u", u)
    if isinstance(layer.bias, biases.Disentangled):
        scale = 1 / math.sqrt(3 * head_dim)
    if getattr(layer.bias, "log_floor", None):
        floor, alpha = layer.bias.log_floor, layer.bias.log_alpha
        q = q * x.new_tensor([[1 + alpha * math.log(max(1, (p + 1) / floor))] for p in range(n)])
    heads = []
    for h in range(HEADS):
        shared = h * KV_HEADS // HEADS
        part, group = slice(h * head_dim, None), slice(shared * head_dim, None)
        q_h, k_h, v_h = (t[:, s][:, :head_dim] for t, s in ((q, part), (k, group), (v, group)))
        if layer.rotary:
            q_h, k_h = rotated(q_h), rotated(k_h)
        logits = (q_h + u[h]) @ k_h.T * scale + dense[h]
        heads.append(logits.masked_fill(~visible, -math.inf).softmax(-1) @ v_h)
    return layer.out(torch.cat(heads, -1))


def rotated(x: Tensor) -> Tensor:
    """Rotary positions as complex numbers, whose phases advance with the position."""
    half = x.shape[-1] // 2
    z = torch.complex(x[:, :half], x[:, half:])
    phases = [[m * 10000 ** (-i / half) for i in range(half)] for m in range(len(x))]
    z = z * torch.exp(1j * torch.tensor(phases, dtype=torch.float64))
    return torch.cat([z.real, z.imag], -1)


@pytest.mark.parametrize(
    ("scheme", "causal"), [*((s, True) for s in SCHEMES), *((s, False) for s in TWO_SIDED)]
)
def test_attention_equals_plain_pytorch(scheme, causal):
    layer = larger(BiasedAttention(DIM, HEADS, scheme, kv_heads=KV_HEADS, causal=causal).double())
    x = torch.randn(2, 11, DIM, dtype=torch.float64)
    each = [with_terms(layer.out, written_out, layer, sequence, causal) for sequence in x]
    exact, terms = map(torch.stack, zip(*each, strict=True))
    assert_close_to_float64(layer(x), exact, None, scheme, terms)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_cached_steps_equal_whole_sequences(scheme):
    model = causal_lm(scheme)
    tokens = torch.randint(VOCABULARY, (2, 23))
    with torch.no_grad():
        caches = model.make_caches(2)
        parts = [model(part, caches) for part in tokens.split([9, 1, 6, 7], 1)]
        exact, terms = with_terms(model.head, model, tokens)
        assert_close_to_float64(torch.cat(parts, 1), exact, None, scheme, terms)


@pytest.mark.parametrize("scheme", TWO_SIDED)
def test_sequences_of_different_lengths_keep_their_own_positions(scheme):
    model = causal_lm(scheme)
    tokens = torch.randint(VOCABULARY, (2, 12))
    following = torch.randint(VOCABULARY, (2, 3))
    with torch.no_grad():
        caches = model.make_caches(2)
        model(tokens, caches)
        for cache in caches:
            cache.truncate([12, 5])
        steps = model(following, caches)
        for b, length in enumerate((12, 5)):
            whole = torch.cat([tokens[b, :length], following[b]])[None]
            exact, terms = (x[0, -3:] for x in with_terms(model.head, model, whole))
            assert_close_to_float64(steps[b], exact, None, f"sequence {b}", terms)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_parameter_is_trained(scheme):
    model = causal_lm(scheme)
    model(torch.randint(VOCABULARY, (2, 64))).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_language_model_does_not_see_later_tokens(scheme):
    model = causal_lm(scheme)
    tokens = torch.randint(VOCABULARY, (1, 20))
    changed = tokens.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % VOCABULARY
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert (before[:, 12:] != after[:, 12:]).any(-1).all()


@pytest.mark.parametrize("scheme", TWO_SIDED)
def test_an_encoder_is_bidirectional(scheme):
    model, tokens = encoder(scheme), torch.randint(VOCABULARY, (1, 16))
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % VOCABULARY
    assert (model(changed)[0, 0] != model(tokens)[0, 0]).any()


def test_only_models_with_positions_depend_on_the_order():
    """Without positions, the logits of a permuted sequence are the permuted logits."""
    tokens, order = torch.randint(VOCABULARY, (1, 10)), torch.randperm(10)
    while torch.equal(tokens[:, order], tokens):
        order = torch.randperm(10)
    for scheme in ("none", "sinusoidal", "learned", "rotary", "alibi", "cable"):
        model = larger(Encoder(VOCABULARY, DIM, 2, HEADS, scheme, max_length=10).double())
        plain, terms = (x[:, order] for x in with_terms(model.head, model, tokens))
        permuted = model(tokens[:, order])
        if scheme == "none":
            assert_close_to_float64(permuted, plain, None, scheme, terms)
        else:
            assert (permuted - plain).abs().max() > 1e-6 * plain.abs().max(), scheme


def test_sinusoidal_embeddings_follow_the_paper():
    """Except for the scale of the sum: that of tokens is the same as without positions."""
    model = CausalLM(VOCABULARY, DIM, 1, HEADS, "sinusoidal").double()
    tokens = torch.randint(VOCABULARY, (1, 9))
    embedded, of_tokens = model.embedding(tokens), model.embedding.tokens(tokens)
    added, terms = embedded - of_tokens, embedded.abs() + of_tokens.abs()
    angles = [[m / 10000 ** (2 * i / DIM) for i in range(DIM // 2)] for m in range(9)]
    exact = [[*map(math.sin, row), *map(math.cos, row)] for row in angles]
    exact = NormalEmbedding.STD * torch.tensor(exact, dtype=torch.float64)[None]
    assert_close_to_float64(added, exact, None, "sinusoidal", terms)


def test_models_have_the_parameters_of_gpt_2_and_bert():
    with torch.device("meta"):
        gpt = CausalLM(50257, 768, 12, 12, "learned", max_length=1024)
        bert = Encoder(30522, 768, 12, 12, "learned", max_length=512)
        assert gpt(torch.zeros(2, 7, dtype=torch.long)).shape == (2, 7, 50257)
    assert sum(p.numel() for p in gpt.parameters()) == 124_439_808
    # BERT base with its masked language modeling head, without its two segment embeddings.
    assert sum(p.numel() for p in bert.parameters()) == 109_514_298 - 2 * 768


def test_the_backend_is_used_in_every_call():
    model = CausalLM(VOCABULARY, DIM, 1, HEADS, backend="tpu")
    tokens = torch.zeros(1, 2, dtype=torch.long)
    for arguments in ((tokens,), (tokens, model.make_caches(1))):
        with torch.no_grad(), pytest.raises(ValueError, match=r"^backend is 'tpu'"):
            model(*arguments)


@pytest.mark.parametrize(
    "scheme", ["tests.nn.test_modules:Quadratic", "tests.nn.test_modules:Gate"]
)
def test_custom_biases_are_named_by_their_path(scheme):
    layer = BiasedAttention(DIM, HEADS, scheme).double()
    assert type(layer.bias(torch.zeros(1, 3, DIM).double())).__name__ in (
        "Quadratic",
        "CumulativeBias",
    )
    assert causal_lm(scheme)(torch.randint(VOCABULARY, (1, 7))).shape == (1, 7, VOCABULARY)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: positions("rope"),
            ValueError,
            "positions is 'rope'; it may be none, sinus.*, disentangled, gated_table$",
        ),
        (lambda: positions(7), TypeError, "positions is 7; it must be a name"),
        (
            lambda: positions("tests.nn.test_modules:Nothing"),
            ValueError,
            "positions is 'tests.nn.test_modules:Nothing'",
        ),
        (lambda: positions("no.such:Bias"), ValueError, "positions is 'no.such:Bias'"),
        (lambda: positions("math:pi"), ValueError, "positions is 'math:pi'"),
        (lambda: BiasedAttention(24, 5), ValueError, "num_heads is 5; it must be positive and"),
        (lambda: BiasedAttention(24, 4, kv_heads=3), ValueError, "kv_heads is 3; it must divide"),
        (lambda: BiasedAttention(12, 4, "rotary"), ValueError, "dim / num_heads is 3; rotary"),
        (
            lambda: BiasedAttention(24, 4, "window(5)", causal=False),
            ValueError,
            "positions has a window",
        ),
        (lambda: CausalLM(9, 24, 1, 4, "learned"), ValueError, "max_length is None; learned"),
        (lambda: CausalLM(9, 25, 1, 5, "sinusoidal"), ValueError, "dim is 25; it must be even"),
        (
            lambda: CausalLM(9, 24, 1, 4, "learned", max_length=5)(torch.zeros(1, 6).long()),
            ValueError,
            "tokens has a sequence of 6; learned positions have at most 5",
        ),
    ],
)
def test_invalid_arguments_are_refused(make, error, message):
    with pytest.raises(error, match="^" + message):
        make()
