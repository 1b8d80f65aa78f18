"""A trained vector for each clipped distance."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.models import speecht5, wav2vec2_bert

from biased_flash_attn.biases import Shaw
from tests.biases.relative_cases import (
    REFERENCE,
    assert_same_results,
    attended,
    drawn,
    named,
    randomized,
)

HEADS, HEAD_DIM = 3, 4


def by_pairs(bias: Shaw, q: torch.Tensor, n_key: int) -> torch.Tensor:
    """The paper's tensor a_ij of every pair (its equations 2 and 4), for the last queries."""
    n_query = q.shape[2]
    pairs = torch.stack(
        [
            bias.distance_embedding.weight[max(-bias.left, min(bias.right, j - i)) + bias.left]
            for i in range(n_key - n_query, n_key)
            for j in range(n_key)
        ]
    ).unflatten(0, (n_query, n_key))
    return torch.einsum("bhid,ijd->bhij", q, pairs) * q.shape[-1] ** -0.5


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sides", [(2, 2), (4, 1), (0, 3), (5, 0), (20, 20)])
@pytest.mark.parametrize("lengths", [(9, 9), (3, 8), (1, 1)])
def test_results_equal_the_pairwise_definition(lengths, sides, causal):
    bias = randomized(Shaw(HEADS, HEAD_DIM, *sides))
    n_query, n_key = lengths
    q, k, v = (drawn(2, HEADS, n, HEAD_DIM) for n in (n_query, n_key, n_key))

    def exact():
        dense = by_pairs(bias, q, n_key)
        hidden = torch.ones(lengths, dtype=torch.bool).triu(1 + n_key - n_query)
        dense = dense.masked_fill(hidden, -torch.inf) if causal else dense
        return attended(q, k, v, dense, False, HEAD_DIM**-0.5)

    assert_same_results(
        lambda: REFERENCE(q, k, v, bias(q=q), causal=causal),
        exact,
        named(bias, q=q, k=k, v=v),
    )


def heads_of(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)


def test_equals_the_layers_of_w2v_bert():
    config = transformers.Wav2Vec2BertConfig(
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        left_max_position_embeddings=4,
        right_max_position_embeddings=2,
        position_embeddings_type="relative_key",
        attn_implementation="eager",
    )
    layer = randomized(wav2vec2_bert.modeling_wav2vec2_bert.Wav2Vec2BertSelfAttention(config))
    bias = Shaw(HEADS, HEAD_DIM, 4, 2)
    bias.distance_embedding = layer.distance_embedding
    x = drawn(2, 11, HEADS * HEAD_DIM)

    def ours():
        q, k, v = (heads_of(f(x)) for f in (layer.linear_q, layer.linear_k, layer.linear_v))
        o = REFERENCE(q, k, v, bias(q=q), causal=False)
        return layer.linear_out(o.transpose(1, 2).flatten(2))

    assert_same_results(ours, lambda: layer(x)[0], named(layer, x=x))


def test_equals_the_layers_of_speecht5():
    """Its table is ordered by distance, with one more entry for keys after the query."""
    config = transformers.SpeechT5Config(
        hidden_size=HEADS * HEAD_DIM, encoder_attention_heads=HEADS
    )
    layer = randomized(speecht5.modeling_speecht5.SpeechT5Attention(config.hidden_size, HEADS))
    positions = randomized(
        speecht5.modeling_speecht5.SpeechT5RelativePositionalEncoding(HEAD_DIM, 4)
    )
    x = drawn(2, 11, HEADS * HEAD_DIM)

    def ours():
        bias = Shaw(HEADS, HEAD_DIM, 3, 4)
        del bias.distance_embedding.weight
        bias.distance_embedding.weight = positions.pe_k.weight.flip(0)
        q, k, v = (heads_of(f(x)) for f in (layer.q_proj, layer.k_proj, layer.v_proj))
        o = REFERENCE(q, k, v, bias(q=q), causal=False)
        return layer.out_proj(o.transpose(1, 2).flatten(2))

    def exact():
        return layer(x, position_bias=positions(x))[0]

    assert_same_results(ours, exact, named(layer, positions, x=x))


def test_initial_values_of_shaw():
    bias = Shaw(8, 64, 64, 8)
    assert bias.distance_embedding.weight.shape == (73, 64)
    bound = (6 / (73 + 64)) ** 0.5
    largest = bias.distance_embedding.weight.abs().max().item()
    assert 0.9 * bound < largest <= bound
    assert Shaw(8, 64).distance_embedding.weight.shape == (33, 64)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Shaw(2, 129), ValueError, "head_dim is 129; it must be at most 128"),
        (lambda: Shaw(2, 8, -1), ValueError, "left must be 0 or more, not -1"),
        (lambda: Shaw(2, 8, 3, 1.5), TypeError, "right must be an int"),
        (lambda: Shaw(2, 8, scale="x"), TypeError, "scale must be a number"),
        (lambda: Shaw(2, 8)(q=torch.ones(1, 3, 5, 8)), ValueError, r"q has shape \(1, 3, 5, 8\)"),
        (lambda: Shaw(2, 8)(q=torch.ones(5, 8)), ValueError, r"it must be \(B, 2, N, 8\)"),
    ],
)
def test_errors_name_the_argument(make, error, message):
    with pytest.raises(error, match=message):
        make()
