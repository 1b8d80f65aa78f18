"""LayoutLMv3: words with boxes, and patches of an image."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.integrations.transformers.cases import (
    VOCABULARY,
    accelerate,
    accelerated,
    assert_closer_to_float32,
    lengths_mask,
    tokens,
    unaccelerate,
)
from tests.integrations.transformers.test_unaccelerate import state_of
from tests.support.numerics import assert_same_model


def layoutlmv3(head: str = "Model", **config):
    shape = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 6, "intermediate_size": 64, "max_position_embeddings": 512}
    shape |= {"coordinate_size": 8, "shape_size": 8, "input_size": 16, "patch_size": 4}
    shape |= {"num_channels": 1, "initializer_range": 0.2, "attention_probs_dropout_prob": 0.0}
    config = transformers.LayoutLMv3Config(**shape | config)
    model = getattr(
        transformers, f"LayoutLMv3{head}" if head == "Model" else f"LayoutLMv3For{head}"
    )
    model = model._from_config(config, attn_implementation="eager").eval()
    trunk = getattr(model, "layoutlmv3", model)
    torch.nn.init.normal_(trunk.pos_embed)
    return model


def page(image: bool, mask, length: int = 40) -> dict:
    corners = torch.randint(0, 500, (3, length, 2))
    boxes = torch.cat([corners, corners + torch.randint(1, 500, (3, length, 2))], 2)
    inputs = {"input_ids": tokens(3, length), "bbox": boxes, "attention_mask": mask}
    return inputs | ({"pixel_values": torch.randn(3, 1, 16, 16)} if image else {})


BIASES = {
    "places": {},
    "positions": {"has_spatial_attention_bias": False},
    "none": {"has_spatial_attention_bias": False, "has_relative_attention_bias": False},
}


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("side", ["none", "left", "right", "both", "between"])
@pytest.mark.parametrize("bias", BIASES)
def test_model_and_its_gradients(bias, side, image):
    model, mask = layoutlmv3(**BIASES[bias]), lengths_mask(side, 3, 40)
    inputs, results = page(image, mask), []
    kept = torch.ones(3, 40).bool() if mask is None else mask.bool()
    if image:
        kept = torch.cat([kept, kept.new_ones(3, 17)], 1)
    for m in (accelerated(model), model):
        states = m(**inputs).last_hidden_state[kept]
        states.backward(torch.randn(states.shape, generator=torch.Generator().manual_seed(0)))
        results.append((states, {name: p.grad for name, p in m.named_parameters()}))
    (actual, gradients), (states, expected) = results
    assert_same_model(actual, states, "hidden states")
    largest = torch.stack([x.abs().max() for x in expected.values() if x is not None])
    for name, gradient in expected.items():
        if gradient is None:
            assert gradients[name] is None, name
        else:
            # What is added to all keys does not change the weights.
            made_of = largest if name.endswith("key.bias") else None
            assert_same_model(gradients[name], gradient, f"gradient of {name}", made_of)


@pytest.mark.parametrize("head", ["TokenClassification", "QuestionAnswering"])
def test_heads(head):
    model, mask = layoutlmv3(head), lengths_mask("right", 3, 40)
    inputs = page(True, mask)
    actual, expected = accelerated(model)(**inputs), model(**inputs)
    for ours, theirs in zip(actual.to_tuple(), expected.to_tuple(), strict=True):
        # Answers may also be in the image, whose patches follow the words.
        kept = torch.nn.functional.pad(mask, (0, ours.shape[1] - 40), value=1).bool()
        assert_same_model(ours[kept], theirs[kept], head)


@pytest.mark.parametrize("side", ["none", "right", "between"])
def test_weights(side):
    model, mask = layoutlmv3(), lengths_mask(side, 3, 40)
    inputs = page(True, mask) | {"output_attentions": True}
    kept = torch.ones(3, 57).bool()
    if mask is not None:
        kept[:, :40] = mask.bool()
    actual, expected = (m(**inputs).attentions for m in (accelerated(model), model))
    assert len(expected) == 2
    for layer in zip(actual, expected, strict=True):
        assert_same_model(*(x.transpose(1, 2)[kept] for x in layer), "weights")


def test_bfloat16_results_are_closer_to_float32():
    assert_closer_to_float32(layoutlmv3(num_hidden_layers=1), page(False, None, 400))


def test_unaccelerate():
    model, inputs = layoutlmv3(), page(True, None)
    before, expected = state_of(model), model(**inputs).last_hidden_state
    assert state_of(accelerate(model)) != before
    assert state_of(unaccelerate(model)) == before
    assert torch.equal(model(**inputs).last_hidden_state, expected)


def test_dropout_is_refused_in_training():
    model = accelerated(layoutlmv3(attention_probs_dropout_prob=0.1)).train()
    with pytest.raises(NotImplementedError, match=r"attention dropout is 0\.1"):
        model(**page(False, None))
