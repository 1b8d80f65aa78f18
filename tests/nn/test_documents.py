"""Documents packed in one row: results of each are those of the document alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from biased_flash_attn.nn import BiasedAttention, CausalLM, FusedAttention
from tests.nn.models import (
    DIM,
    EVERY_MODEL,
    HEADS,
    KV_HEADS,
    VOCABULARY,
    causal_lm,
    check_each_alone,
    encoder,
)

LENGTHS = (7, 0, 1, 13, 0)


def offsets(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


CU_SEQLENS = offsets(0, *torch.tensor(LENGTHS).cumsum(0).tolist())


@pytest.mark.parametrize(("make", "scheme"), EVERY_MODEL)
def test_logits_and_gradients_of_documents_are_those_of_each_alone(make, scheme):
    model = make(scheme)
    tokens = torch.randint(VOCABULARY, (1, sum(LENGTHS)))
    bounds = pairwise(CU_SEQLENS.tolist())
    documents = [(0, slice(first, end)) for first, end in bounds if first < end]
    check_each_alone(model, model(tokens, cu_seqlens=CU_SEQLENS), tokens, documents)


def test_documents_of_learned_positions_may_be_longer_together_than_max_length():
    model = CausalLM(VOCABULARY, DIM, 1, HEADS, "learned", max_length=5)
    tokens = torch.randint(VOCABULARY, (1, 8))
    assert model(tokens, cu_seqlens=offsets(0, 3, 8)).shape == (1, 8, VOCABULARY)
    with pytest.raises(ValueError, match=r"^tokens has a sequence of 6; learned positions"):
        model(tokens, cu_seqlens=offsets(0, 2, 8))


@pytest.mark.parametrize("scheme", ["cable", "rotary"])
def test_a_compiled_layer_takes_documents(scheme):
    layer = BiasedAttention(DIM, HEADS, scheme, kv_heads=KV_HEADS)
    x = torch.randn(1, sum(LENGTHS), DIM)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, cu_seqlens=CU_SEQLENS), layer(x, cu_seqlens=CU_SEQLENS))


@pytest.mark.parametrize("scheme", ["learned", "cable"])
def test_documents_have_meta_logits(scheme):
    with torch.device("meta"):
        model = CausalLM(VOCABULARY, DIM, 1, HEADS, scheme, max_length=8)
        tokens = torch.zeros(1, 21, dtype=torch.long)
        logits = model(tokens, cu_seqlens=torch.zeros(3, dtype=torch.int32))
    assert logits.shape == (1, 21, VOCABULARY)


@pytest.mark.parametrize("scheme", ["alibi", "learned", "rotary"])
@pytest.mark.parametrize(
    ("cu_seqlens", "error", "message"),
    [
        ([0, 5], TypeError, "cu_seqlens is a list; it must be a torch.Tensor"),
        (
            offsets(0, 5, dtype=torch.int64),
            TypeError,
            "cu_seqlens is torch.int64; it must be torch.int32",
        ),
        (offsets(0, 5)[None], ValueError, r"cu_seqlens has shape \(1, 2\); it must be \(sequences"),
        (offsets(0, 5).to("meta"), ValueError, "cu_seqlens is on meta and tokens on cpu"),
        (offsets(2, 3), ValueError, r"cu_seqlens begins with 2; .* sums of lengths, \[0, 2, 5\]$"),
        (offsets(0, 4, 3, 5), ValueError, "cu_seqlens falls from 4 to 3 at 2; it must not"),
        (offsets(0, 4), ValueError, "cu_seqlens ends with 4; .* with the number of tokens, 5$"),
        (offsets(0, 6), ValueError, "cu_seqlens ends with 6; .* with the number of tokens, 5$"),
    ],
)
def test_invalid_offsets_are_refused(scheme, cu_seqlens, error, message):
    model = causal_lm(scheme)
    with pytest.raises(error, match="^" + message):
        model(torch.zeros(1, 5, dtype=torch.long), cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("scheme", ["alibi", "learned"])
def test_documents_are_refused_with_caches_padding_and_several_rows(scheme):
    model, tokens = causal_lm(scheme), torch.zeros(1, 5, dtype=torch.long)
    with torch.no_grad(), pytest.raises(ValueError, match=r"^cu_seqlens is given with a cache"):
        model(tokens, model.make_caches(1), cu_seqlens=offsets(0, 5))
    mask = torch.ones(1, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"^cu_seqlens is given with key_padding_mask"):
        model(tokens, key_padding_mask=mask, cu_seqlens=offsets(0, 5))
    with pytest.raises(ValueError, match=r"^cu_seqlens is given with 2 rows of tokens"):
        model(tokens.expand(2, 5), cu_seqlens=offsets(0, 5))


def test_fused_attention_refuses_documents_in_several_rows():
    q = torch.randn(2, HEADS, 5, 8)
    with pytest.raises(ValueError, match=r"^cu_seqlens is given with 2 rows of tokens"):
        FusedAttention()(q, q, q, None, cu_seqlens=offsets(0, 5))


@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        ((2, 5), (1, 5), r"^k has batch 1"),
        ((1, 5), (1, 7), "^cu_seqlens is given with 5 queries and 7 keys; they must be as many"),
    ],
)
def test_fused_attention_refuses_other_queries_than_keys(q, k, message):
    q, k = (torch.randn(batch, HEADS, n, 8) for batch, n in (q, k))
    with pytest.raises(ValueError, match=message):
        FusedAttention()(q, k, k, None, cu_seqlens=offsets(0, k.shape[2]))


def test_offsets_are_read_once_by_a_model(monkeypatch):
    read = []
    monkeypatch.setattr(
        "biased_flash_attn.nn.tokens.check_offsets", lambda *values: read.append(values)
    )
    causal_lm("alibi")(torch.zeros(1, 21, dtype=torch.long), cu_seqlens=CU_SEQLENS)
    assert len(read) == 1


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([[1, 2]], TypeError, "tokens is a list; it must be a torch.Tensor"),
        (torch.zeros(1, 3), TypeError, "tokens is torch.float32; it must be torch.int64 or"),
        (torch.zeros(3, dtype=torch.long), ValueError, r"tokens has shape \(3,\); it must be \(b"),
    ],
)
@pytest.mark.parametrize("make", [causal_lm, encoder])
def test_invalid_tokens_are_refused(make, tokens, error, message):
    with pytest.raises(error, match="^" + message):
        make("alibi")(tokens)
