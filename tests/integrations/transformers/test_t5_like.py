"""Models with T5's layers whose inputs are images, pages or music."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.integrations.transformers.cases import (
    VOCABULARY,
    accelerated,
    differentiated,
    kept_by,
    lengths_mask,
    t5,
    tokens,
)
from tests.support.numerics import assert_same_model


def udop(**config):
    return t5("Udop", image_size=16, patch_size=4, num_channels=1, **config)


def pop2piano():
    return t5("Pop2Piano", dense_act_fn="gelu_new")


def pix2struct():
    text = {"vocab_size": VOCABULARY, "hidden_size": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2}
    text |= {"num_heads": 4, "initializer_factor": 1.1, "dropout_rate": 0.0}
    vision = {"hidden_size": 64, "patch_embed_hidden_size": 12, "d_ff": 64, "d_kv": 16}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 4, "seq_len": 40}
    config = transformers.Pix2StructConfig(text_config=text, vision_config=vision)
    config.vision_config.initializer_range = 0.1
    model = transformers.Pix2StructForConditionalGeneration
    return model._from_config(config, attn_implementation="eager").eval()


def page_inputs() -> dict:
    """Words with their boxes, and an image, whose patches follow the padding of the words."""
    corners = torch.rand(3, 40, 2) * 0.5
    boxes = torch.cat([corners, corners + 0.4 * torch.rand(3, 40, 2)], 2)
    image = torch.randn(3, 1, 16, 16)
    return {"input_ids": tokens(3, 40), "bbox": boxes, "pixel_values": image}


def word_inputs() -> dict:
    inputs = page_inputs()
    del inputs["pixel_values"]
    return inputs


def music_inputs() -> dict:
    return {"inputs_embeds": torch.randn(3, 40, 64)}


def patch_inputs() -> dict:
    """Each patch begins with its row and column."""
    places = torch.randint(1, 40, (3, 40, 2)).float()
    return {"flattened_patches": torch.cat([places, torch.randn(3, 40, 12)], 2)}


MODELS = {
    "udop": (udop, page_inputs),
    "udop, words": (udop, word_inputs),
    "pop2piano": (pop2piano, music_inputs),
    "pix2struct": (pix2struct, patch_inputs),
}


@pytest.mark.parametrize("side", ["none", "left", "right", "between"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients(name, side):
    make, inputs_for = MODELS[name]
    model, mask, decoder_mask = make(), lengths_mask(side, 3, 40), lengths_mask(side, 3, 150)
    inputs = {"attention_mask": mask, "decoder_input_ids": tokens(3, 150), **inputs_for()}
    inputs["decoder_attention_mask"] = decoder_mask
    kept = kept_by(decoder_mask, 3, 150)
    logits, gradients = differentiated(accelerated(model), inputs, kept)
    expected, expected_gradients = differentiated(model, inputs, kept)
    assert_same_model(logits, expected, "logits")
    for key, gradient in expected_gradients.items():
        if gradient is not None:
            assert_same_model(gradients[key], gradient, f"gradient of {key}")
    tables = [key for key in gradients if key.endswith("relative_attention_bias.weight")]
    assert any(gradients[key] is not None and gradients[key].any() for key in tables)


@pytest.mark.parametrize("name", ["udop", "pix2struct"])
def test_generation(name):
    make, inputs_for = MODELS[name]
    model, mask = make(), lengths_mask("left", 3, 40)
    options = {"max_new_tokens": 48, "do_sample": False, "eos_token_id": None, "num_beams": 2}
    inputs = {"attention_mask": mask, **inputs_for()}
    actual, expected = (m.generate(**inputs, **options) for m in (accelerated(model), model))
    assert torch.equal(actual, expected)


def test_generated_music():
    model = t5("Pop2Piano", composer_vocab_size=1)
    model.generation_config.composer_to_feature_token = {"composer1": 3}
    features, mask = torch.randn(3, 40, 64), lengths_mask("right", 3, 40)
    inputs = {"input_features": features, "attention_mask": mask, "max_new_tokens": 48}
    actual, expected = (
        m.generate(**inputs, do_sample=False, eos_token_id=None)
        for m in (accelerated(model), model)
    )
    assert actual.shape[1] > 48
    assert torch.equal(actual, expected)
