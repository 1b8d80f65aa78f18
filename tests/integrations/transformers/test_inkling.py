"""Inkling and Inkling 2 on this package: bands, sinks, positions and the multimodal models."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.models import inkling as of_inkling
from transformers.models import inkling2 as of_inkling2

from tests.integrations.transformers.cases import (
    INKLINGS,
    VOCABULARY,
    accelerate,
    accelerated,
    assert_same_steps,
    differentiated,
    inkling,
    inkling2,
    inkling_config,
    lengths_mask,
    tokens,
)
from tests.support.numerics import assert_same_model

# Parameters: the profiles of the distance.
PROFILES = re.compile(r"(rel_logits_proj|relative_position_bias)\.proj$")


@pytest.mark.parametrize(
    ("make", "dense"),
    [
        (inkling, of_inkling.modeling_inkling.InklingRelativeLogits),
        (inkling2, of_inkling2.modeling_inkling2.Inkling2RelativePositionBias),
    ],
    ids=["inkling", "inkling 2"],
)
def test_dense_biases_are_not_computed(make, dense, monkeypatch):
    def fail(*_):
        raise AssertionError("a dense bias was computed")

    monkeypatch.setattr(dense, "forward", fail)
    model = make()
    with pytest.raises(AssertionError, match="dense bias"):
        model(tokens(2, 30))
    accelerate(model)
    model(tokens(2, 30)).logits.sum().backward()
    profiles = [x for name, x in model.named_parameters() if PROFILES.search(name)]
    assert len(profiles) == len(model.model.layers)
    assert all(x.grad.any() for x in profiles)
    model.generate(tokens(2, 9), max_new_tokens=20, eos_token_id=None)


def test_distances_of_all_pairs_are_computed_for_eager_models_alone():
    model, given = inkling2(), []
    ours = accelerated(model)
    for layer in (ours.model.layers[0], model.model.layers[0]):
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: given.append(kwargs["relative_distance"]), with_kwargs=True
        )
    ours(tokens(2, 30))
    with pytest.raises(NotImplementedError, match="static caches are not supported"):
        ours(tokens(2, 9), cache=transformers.StaticCache(ours.config, max_cache_len=20))
    assert given == [None]
    model(tokens(2, 30))
    assert given[1].shape == (30, 30)


@pytest.mark.parametrize("name", INKLINGS)
@pytest.mark.parametrize("length", [1, 5])
def test_inputs_shorter_than_the_bands(name, length):
    model, ids = INKLINGS[name](), tokens(2, length)
    with torch.no_grad():
        assert_same_model(accelerated(model)(ids).logits, model(ids).logits, "logits")


@pytest.mark.parametrize("positions", [torch.arange(30) + 70, torch.arange(60).view(2, 30)])
@pytest.mark.parametrize("make", [inkling, inkling2])
def test_logits_are_scaled_by_model_positions(make, positions):
    """Inkling counts all tokens, including padding and cached ones; Inkling 2 uses position_ids."""
    model, inputs = make(), {"input_ids": tokens(2, 30), "position_ids": positions.view(-1, 30)}
    inputs["attention_mask"] = torch.ones(2, 30).long()
    with torch.no_grad():
        expected = model(**inputs).logits
        assert_same_model(accelerated(model)(**inputs).logits, expected, "logits")


def test_hidden_states_wider_than_heads_may_be():
    """Inkling 2 attends to hidden states of earlier layers with heads of their width."""
    model, ids = inkling2(hidden_size=272), tokens(2, 20)
    kept = torch.ones(2, 20, dtype=torch.bool)
    actual, expected = (
        differentiated(m, {"input_ids": ids}, kept) for m in (accelerated(model), model)
    )
    assert_same_model(actual[0], expected[0], "logits")
    largest = torch.stack([x.abs().max() for x in expected[1].values() if x is not None])
    for name, gradient in expected[1].items():
        if gradient is not None:
            assert_same_model(actual[1][name], gradient, f"gradient of {name}", largest)


@pytest.mark.parametrize("make", [inkling, inkling2])
def test_sequences_packed_by_position_ids_are_refused(make):
    model, positions = accelerated(make()), torch.arange(10).repeat(3)[None]
    with pytest.raises(NotImplementedError, match="sequences packed by position_ids"):
        model(tokens(1, 30), position_ids=positions, use_cache=False)


def test_convolutions_within_packed_sequences(monkeypatch):
    """Those of full layers; others need a kernel of another package, which is left out here."""
    theirs = of_inkling2.modeling_inkling2
    own = theirs.causal_conv1d_fn
    monkeypatch.setattr(theirs, "causal_conv1d_fn", lambda *args, seq_idx: own(*args))
    model, ids = inkling2(layers=1), tokens(2, 30)
    sequences = (torch.arange(30) // 13).int().expand(2, -1)
    with torch.no_grad():
        expected = model(ids, seq_idx=sequences).logits
        assert not torch.equal(expected, model(ids, seq_idx=None).logits)
        assert_same_model(accelerated(model)(ids, seq_idx=sequences).logits, expected, "logits")


def test_layers_of_a_cache_may_be_offset():
    model, ids = inkling2(layers=2), tokens(2, 20)
    caches = [transformers.DynamicCache(config=inkling2(layers=4).config) for _ in range(2)]
    with torch.no_grad():
        ours, theirs = (
            m(ids, cache=cache, cache_offset=2).logits
            for m, cache in zip((accelerated(model), model), caches, strict=True)
        )
    assert_same_model(ours, theirs, "logits")
    for mine, own in zip(*(cache.layers for cache in caches), strict=True):
        assert mine.get_seq_length() == own.get_seq_length()


def multimodal(family: str):
    """A text and image model, whose config contains that of the text model."""
    text = inkling_config(family, vocab_size=VOCABULARY, pad_token_id=0, initializer_range=0.15)
    parts = {
        "text_config": text,
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "text_hidden_size": text["hidden_size"],
        },
        "image_token_id": 1,
    }
    if family == "Inkling":
        parts |= {"audio_config": {"n_mel_bins": 2, "mel_vocab_size": 4}, "audio_token_id": 1}
    config = getattr(transformers, f"{family}Config")(**parts)
    model = getattr(transformers, f"{family}ForConditionalGeneration")
    return model._from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("family", ["Inkling", "Inkling2"])
def test_multimodal_models(family, side):
    from biased_flash_attn.integrations.transformers import NAME

    model = multimodal(family)
    ours, config = accelerated(model), model.config
    mask = lengths_mask(side, 2, 40)
    inputs = {"input_ids": tokens(2, 40), "attention_mask": mask}
    kept = torch.ones(2, 40, dtype=torch.bool) if mask is None else mask.bool()
    logits, gradients = differentiated(ours, inputs, kept)
    expected, expected_gradients = differentiated(model, inputs, kept)
    assert_same_model(logits, expected, "logits")
    for name in filter(PROFILES.search, gradients):
        assert_same_model(gradients[name], expected_gradients[name], f"gradient of {name}")
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    assert_same_steps(*(m.generate(**inputs, **options) for m in (ours, model)))
    assert config.text_config._attn_implementation == "eager"
    assert ours.config.text_config is ours.model.language_model.config
    assert ours.config.text_config._attn_implementation == NAME
    assert ours.config.vision_config._attn_implementation == "eager"


@pytest.mark.parametrize("drafted", ["hybrid_sliding", "hybrid"])
def test_layers_that_draft_tokens(drafted):
    """`generate(use_mtp=True)` creates them from the last layer and the config of a model."""
    model = inkling(
        num_mtp_layers=2,
        mtp_local_layer_ids=[0, 1] if drafted == "hybrid_sliding" else [],
    )
    drafts, ids = MtpModel(model, 2).eval(), tokens(1, 40)
    for weight in drafts.layers.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    ours = MtpModel(accelerated(model), 2).eval()
    ours.load_state_dict(drafts.state_dict())
    assert drafts.config.layer_types == [drafted, drafted]
    positions, states = torch.arange(40)[None], torch.randn(1, 40, 32)
    actual, expected = (
        mtp(ids, states, None, positions, MtpCache(config=mtp.config))[1] for mtp in (ours, drafts)
    )
    assert_same_model(actual, expected, "logits")
