"""Products of queries, plus a learned vector, with projected sinusoids of the distance."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from transformers.models import fastspeech2_conformer, parakeet, wav2vec2_conformer

from biased_flash_attn.biases import TransformerXL, transformer_xl
from tests.biases.relative_cases import (
    REFERENCE,
    assert_same_results,
    attended,
    drawn,
    named,
    randomized,
)

HEADS, HEAD_DIM = 3, 4
DIM = HEADS * HEAD_DIM


def sinusoid(d: int, dim: int, order: str) -> list[float]:
    sines, cosines = (
        [f(d / 10000 ** (c / dim)) for c in range(0, dim, 2)] for f in (math.sin, math.cos)
    )
    if order == "halves":
        return sines + cosines
    return [x for pair in zip(sines, cosines, strict=True) for x in pair]


def by_pairs(xl: TransformerXL, q: torch.Tensor, n_key: int) -> torch.Tensor:
    """Terms (b) and (d) of the paper's equation in section 3.3, for the last queries."""
    vectors, offset = [], n_key - q.shape[2]
    for i in range(q.shape[2]):
        for j in range(n_key):
            d = i + offset - j
            if xl.max_distance is None:
                r = torch.tensor(sinusoid(d, xl.dim, xl.order), dtype=torch.float64)
                vectors.append((xl.w_r.weight @ r).unflatten(0, (HEADS, HEAD_DIM)))
            else:
                nearest = max(-xl.max_distance, min(xl.max_distance, d))
                vectors.append(xl.r[..., nearest + xl.max_distance])
    pairs = torch.stack(vectors).unflatten(0, (q.shape[2], n_key))
    return xl.scale * torch.einsum("bhid,ijhd->bhij", q + xl.v[:, None], pairs)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dim": 6, "order": "interleaved"},
        {"max_distance": 3},
        {"max_distance": 30},
        {"scale": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(7, 7), (3, 8)])
def test_results_equal_the_pairwise_definition(lengths, settings, causal):
    xl = randomized(TransformerXL(HEADS, HEAD_DIM, **settings))
    n_query, n_key = lengths
    q, k, v = (drawn(2, HEADS, n, HEAD_DIM) for n in (n_query, n_key, n_key))

    def exact():
        dense = by_pairs(xl, q, n_key)
        hidden = torch.ones(lengths, dtype=torch.bool).triu(1 + n_key - n_query)
        dense = dense.masked_fill(hidden, -torch.inf) if causal else dense
        return attended(q + xl.u[:, None], k, v, dense, False, xl.scale)

    assert_same_results(
        lambda: REFERENCE(xl.queries(q), k, v, xl(q=q), causal=causal, scale=xl.scale),
        exact,
        named(xl, q=q, k=k, v=v),
    )


def heads_of(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)


def attention_of(xl: TransformerXL, linears, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (heads_of(linear(x)) for linear in linears[:3])
    o = REFERENCE(xl.queries(q), k, v, xl(q=q), causal=False)
    return linears[3](o.transpose(1, 2).flatten(2))


def conformer_of(layer, u: str, v: str, linear: str) -> TransformerXL:
    xl = TransformerXL(HEADS, HEAD_DIM, order="interleaved")
    xl.u, xl.v, xl.w_r = (getattr(layer, name) for name in (u, v, linear))
    return xl


def test_equals_the_layers_of_wav2vec2_conformer():
    config = transformers.Wav2Vec2ConformerConfig(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        position_embeddings_type="relative",
        max_source_positions=50,
        attn_implementation="eager",
    )
    models = wav2vec2_conformer.modeling_wav2vec2_conformer
    layer = randomized(models.Wav2Vec2ConformerSelfAttention(config))
    positions = models.Wav2Vec2ConformerRelPositionalEmbedding(config)
    xl, x = conformer_of(layer, "pos_bias_u", "pos_bias_v", "linear_pos"), drawn(2, 11, DIM)
    linears = layer.linear_q, layer.linear_k, layer.linear_v, layer.linear_out
    assert_same_results(
        lambda: attention_of(xl, linears, x),
        lambda: layer(x, relative_position_embeddings=positions(x))[0],
        named(layer, x=x),
        tolerance=1e-5,  # its sinusoids are in float32
    )


def test_equals_the_layers_of_parakeet():
    config = transformers.ParakeetEncoderConfig(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        attn_implementation="eager",
    )
    models = parakeet.modeling_parakeet
    layer = randomized(models.ParakeetEncoderAttention(config, 0))
    positions = models.ParakeetEncoderRelPositionalEncoding(config)
    xl, x = conformer_of(layer, "bias_u", "bias_v", "relative_k_proj"), drawn(2, 11, DIM)
    linears = layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj
    assert_same_results(
        lambda: attention_of(xl, linears, x),
        lambda: layer(x, position_embeddings=positions(x))[0],
        named(layer, x=x),
        tolerance=1e-5,
    )


def test_equals_the_layers_of_fastspeech2_conformer():
    config = transformers.FastSpeech2ConformerConfig(hidden_size=DIM)
    settings = {**config.encoder_config, "num_attention_heads": HEADS}
    models = fastspeech2_conformer.modeling_fastspeech2_conformer
    layer = randomized(models.FastSpeech2ConformerAttention(config, settings))
    positions = models.FastSpeech2ConformerRelPositionalEncoding(config, settings).eval()
    xl, x = conformer_of(layer, "pos_bias_u", "pos_bias_v", "linear_pos"), drawn(2, 11, DIM)
    linears = layer.linear_q, layer.linear_k, layer.linear_v, layer.linear_out
    assert_same_results(
        lambda: attention_of(xl, linears, x),
        lambda: layer(x, pos_emb=positions(x)[1])[0],
        named(layer, x=x),
        tolerance=1e-5,
    )


def test_sinusoids_are_exact_at_large_distances():
    xl = TransformerXL(1, 4, dim=6)
    d = (-100_003.0, 0.0, 99_991.0)
    exact = [sinusoid(x, 6, "halves") for x in d]
    exact = torch.tensor(exact, dtype=torch.float64)
    torch.testing.assert_close(xl.sinusoid(torch.tensor(d)), exact, rtol=0, atol=1e-10)


def test_a_table_of_several_chunks_has_exact_derivatives(monkeypatch):
    monkeypatch.setattr(transformer_xl, "_CHUNK", 3)
    xl = randomized(TransformerXL(HEADS, HEAD_DIM, order="interleaved")).double()
    d = torch.arange(-4, 6, dtype=torch.float64)
    r = torch.tensor([sinusoid(int(x), DIM, "interleaved") for x in d], dtype=torch.float64)
    expected = HEAD_DIM**-0.5 * torch.einsum("cx,dx->cd", xl.w_r.weight, r)
    table = xl.table(d)
    torch.testing.assert_close(table, expected.view(HEADS, HEAD_DIM, len(d)))
    grad = torch.randn_like(table).requires_grad_()
    found = torch.autograd.grad(table, xl.w_r.weight, grad, create_graph=True)
    (own,) = torch.autograd.grad(expected, xl.w_r.weight, grad.flatten(0, 1), create_graph=True)
    torch.testing.assert_close(found[0], own)
    other = torch.randn_like(own)
    second = (torch.autograd.grad(x, grad, other)[0] for x in (*found, own))
    torch.testing.assert_close(*second)


def test_initial_values_are_those_of_the_authors():
    xl = TransformerXL(8, 16)
    shapes = {name: tuple(x.shape) for name, x in xl.state_dict().items()}
    assert shapes == {"u": (8, 16), "v": (8, 16), "w_r.weight": (128, 128)}
    assert xl.w_r.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert xl.u.std().item() == pytest.approx(0.02, rel=0.4)
    learned = TransformerXL(8, 16, max_distance=5)
    shapes = {name: tuple(x.shape) for name, x in learned.state_dict().items()}
    assert shapes == {"u": (8, 16), "v": (8, 16), "r": (8, 16, 11)}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TransformerXL(2, 8, 5), ValueError, "dim is 5; it must be even"),
        (lambda: TransformerXL(2, 8, order="x"), ValueError, "order is 'x'; it must be one of"),
        (lambda: TransformerXL(2, 130), ValueError, "head_dim is 130; it must be at most 128"),
        (lambda: TransformerXL(2, 8, max_distance=0), ValueError, "max_distance must be positive"),
        (lambda: TransformerXL(2, 8)(q=torch.ones(1, 2, 5, 9)), ValueError, "q has shape"),
        (lambda: TransformerXL(2, 8).queries([1]), TypeError, "q must be a floating point tensor"),
    ],
)
def test_errors_name_the_argument(make, error, message):
    with pytest.raises(error, match=message):
        make()
