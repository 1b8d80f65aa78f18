"""MPNet on this package: its heads, its options, and tokens without their padding."""

from __future__ import annotations

import pytest
import torch
from transformers.models import mpnet as of_mpnet

from tests.integrations.transformers.cases import (
    accelerate,
    accelerated,
    lengths_mask,
    mpnet,
    tokens,
)
from tests.support.numerics import assert_same_model

HEADS = [
    *("Model", "MaskedLM", "SequenceClassification", "MultipleChoice"),
    *("TokenClassification", "QuestionAnswering"),
]


@pytest.mark.parametrize("return_dict", [True, False])
@pytest.mark.parametrize("head", HEADS)
def test_heads(head, return_dict):
    """With padding on the right, where the first token of each text is kept."""
    model, mask = mpnet(head), lengths_mask("right", 4, 40)
    ids = torch.where(mask.bool(), tokens(4, 40), 1)
    if head == "MultipleChoice":
        ids, mask = ids.view(2, 2, 40), mask.view(2, 2, 40)
    inputs = {"attention_mask": mask, "return_dict": return_dict}
    actual, expected = accelerated(model)(ids, **inputs), model(ids, **inputs)
    assert type(actual) is type(expected)
    of_tokens = head in ("Model", "MaskedLM", "TokenClassification", "QuestionAnswering")
    actual, expected = (x if isinstance(x, tuple) else x.to_tuple() for x in (actual, expected))
    for ours, theirs in zip(actual, expected, strict=True):
        if of_tokens and ours.shape[:2] == mask.shape:
            ours, theirs = ours[mask.bool()], theirs[mask.bool()]
        assert_same_model(ours, theirs, head)


@pytest.mark.parametrize("side", ["none", "left", "between"])
def test_hidden_states(side):
    model, mask = mpnet(), lengths_mask(side, 3, 40)
    options = {"attention_mask": mask, "output_hidden_states": True}
    ids, kept = tokens(3, 40), slice(None) if mask is None else mask.bool()
    actual, expected = accelerated(model)(ids, **options), model(ids, **options)
    for ours, theirs in zip(actual.hidden_states, expected.hidden_states, strict=True):
        assert_same_model(ours[kept], theirs[kept], "hidden states")


def test_dense_biases_are_not_computed(monkeypatch):
    def fail(*_):
        raise AssertionError("a dense bias was computed")

    monkeypatch.setattr(of_mpnet.modeling_mpnet.MPNetEncoder, "compute_position_bias", fail)
    model, mask = mpnet(), lengths_mask("right", 3, 40)
    with pytest.raises(AssertionError, match="dense bias"):
        model(tokens(3, 40))
    accelerate(model)
    for attention_mask in (None, mask):
        model(tokens(3, 40), attention_mask=attention_mask).logits.sum().backward()
    assert model.mpnet.encoder.relative_attention_bias.weight.grad.any()


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_nothing_is_computed_for_padding(side, monkeypatch):
    """Neither in attention, where a NaN of padding would spread, nor in the layers around it."""
    model, mask, rows = accelerated(mpnet()), lengths_mask(side, 3, 40), []
    layer = of_mpnet.modeling_mpnet.MPNetIntermediate
    own = layer.forward

    def forward(self, states):
        rows.append(states.shape[:2])
        return own(self, states)

    monkeypatch.setattr(layer, "forward", forward)
    embedded = torch.randn(3, 40, 48)
    expected = model.mpnet(inputs_embeds=embedded, attention_mask=mask).last_hidden_state
    embedded[mask == 0] = torch.nan
    actual = model.mpnet(inputs_embeds=embedded, attention_mask=mask).last_hidden_state
    assert torch.equal(actual, expected)
    assert not actual[mask == 0].any()
    assert {*rows} == {(1, int(mask.sum()))}


def test_texts_without_any_token():
    model, mask = accelerated(mpnet()), torch.ones(3, 20).long()
    mask[1] = 0
    ids = tokens(3, 20)
    states = model.mpnet(ids, attention_mask=mask).last_hidden_state
    alone = model.mpnet(ids[2:]).last_hidden_state
    assert_same_model(states[2:], alone, "hidden states")
    assert not states[1].any()


@pytest.mark.parametrize("length", [30, 50])
@pytest.mark.parametrize("side", ["left", "between"])
def test_masks_of_another_length_are_refused(side, length):
    model, mask = accelerated(mpnet()), lengths_mask(side, 3, length)
    with pytest.raises(ValueError, match=f"attention_mask is of {length} keys.* of 40 keys"):
        model(tokens(3, 40), attention_mask=mask)
