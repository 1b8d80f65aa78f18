"""Encoders with T5's layers compute nothing for padding, in attention or elsewhere."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.integrations.transformers.cases import (
    accelerate,
    accelerated,
    lengths_mask,
    t5,
    tokens,
    unaccelerate,
)
from tests.support.numerics import assert_same_model

FAMILIES = ["T5", "MT5", "UMT5", "Pop2Piano"]


def encoder(family: str = "T5"):
    options = {"dense_act_fn": "gelu_new"} if family == "Pop2Piano" else {}
    return t5(family, **options).encoder


def rows_seen(model) -> list:
    """The sizes of the batches that each MLP of the model will receive."""
    seen = []
    for block in model.block:
        block.layer[-1].register_forward_hook(lambda _, args, out: seen.append(args[0].shape[:2]))
    return seen


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_computed_for_padding(family, side):
    """A NaN of padding would spread."""
    model, mask = encoder(family), lengths_mask(side, 3, 40)
    ours, embedded = accelerated(model), torch.randn(3, 40, 64)
    seen, kept = rows_seen(ours), mask.bool()
    expected = model(inputs_embeds=embedded, attention_mask=mask).last_hidden_state
    embedded[~kept] = torch.nan
    actual = ours(inputs_embeds=embedded, attention_mask=mask).last_hidden_state
    assert_same_model(actual[kept], expected[kept], "hidden states")
    assert not actual[~kept].any()
    assert seen == 2 * [(1, int(mask.sum()))]


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_masks_of_any_dtype(kind):
    """Chronos-Bolt's is of the dtype of its parameters."""
    model, mask, ids = encoder(), lengths_mask("left", 3, 40).to(kind), tokens(3, 40)
    ours = accelerated(model)
    seen = rows_seen(ours)
    actual, expected = (m(ids, mask, return_dict=False) for m in (ours, model))
    assert type(actual) is type(expected) is tuple
    assert_same_model(actual[0][mask.bool()], expected[0][mask.bool()], "hidden states")
    assert {*seen} == {(1, int(mask.sum()))}


def test_texts_without_any_token():
    model, mask, ids = accelerated(encoder()), torch.ones(3, 20), tokens(3, 20)
    mask[1] = 0
    states = model(ids, attention_mask=mask).last_hidden_state
    assert_same_model(states[2:], model(ids[2:]).last_hidden_state, "hidden states")
    assert not states[1].any()


def test_batches_without_any_token():
    model, inputs = encoder(), {"input_ids": tokens(2, 10), "attention_mask": torch.zeros(2, 10)}
    actual, expected = (m(**inputs).last_hidden_state for m in (accelerated(model), model))
    assert actual.shape == expected.shape
    actual.sum().backward()
    assert actual.isfinite().all()


class Positional(torch.nn.Embedding):
    """The embedding of a token and of its position in the batch."""

    def forward(self, ids):
        return super().forward(ids) + super().forward(torch.arange(ids.shape[1]))


def test_embeddings_of_positions():
    """Those of tokens are the same with and without padding before them."""
    model, mask, ids = encoder(), lengths_mask("left", 3, 40), tokens(3, 40)
    model.set_input_embeddings(Positional(97, 64))
    actual, expected = (m(ids, mask).last_hidden_state for m in (accelerated(model), model))
    assert_same_model(actual[mask.bool()], expected[mask.bool()], "hidden states")


def test_hooks_of_others_see_the_batch():
    model, mask, seen = encoder(), lengths_mask("right", 3, 40), []
    model.register_forward_hook(lambda *args: seen.append(args[-1].last_hidden_state))
    accelerate(model)
    model.register_forward_hook(lambda *args: seen.append(args[-1].last_hidden_state))
    states = model(tokens(3, 40), mask).last_hidden_state
    assert len(seen) == 2
    assert all(torch.equal(x, states) for x in seen)


def test_ids_and_embeddings_together_are_refused():
    model, mask = accelerated(encoder()), lengths_mask("right", 3, 40)
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model(tokens(3, 40), attention_mask=mask, inputs_embeds=torch.randn(3, 40, 64))


@pytest.mark.parametrize("how", ["argument", "config"])
@pytest.mark.parametrize("side", ["right", "between"])
def test_hidden_states_of_every_layer(side, how):
    """They keep their padding."""
    model, mask, ids = encoder(), lengths_mask(side, 3, 40), tokens(3, 40)
    options = {"output_hidden_states": True} if how == "argument" else {}
    model.config.output_hidden_states = how == "config"
    results = [m(ids, attention_mask=mask, **options) for m in (accelerated(model), model)]
    for ours, theirs in zip(*(x.hidden_states for x in results), strict=True):
        assert_same_model(ours[mask.bool()], theirs[mask.bool()], "hidden states")


def test_unaccelerated_encoders_compute_padding_again():
    model, mask, ids = encoder(), lengths_mask("right", 3, 40), tokens(3, 40)
    expected = model(ids, attention_mask=mask).last_hidden_state
    ours = accelerated(model)
    ours(ids, attention_mask=mask)
    assert torch.equal(unaccelerate(ours)(ids, attention_mask=mask).last_hidden_state, expected)


def test_classification_from_the_last_token():
    """A model that reads hidden states at a token, beside padding on the right."""
    model = transformers.T5ForTokenClassification._from_config(t5().config).eval()
    mask, ids = lengths_mask("right", 3, 40), tokens(3, 40)
    actual, expected = (m(ids, attention_mask=mask).logits for m in (accelerated(model), model))
    assert_same_model(actual[mask.bool()], expected[mask.bool()], "logits")
