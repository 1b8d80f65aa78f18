"""Models that select this package's attention by its name in transformers."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from tests.integrations.transformers.cases import (
    VOCABULARY,
    assert_same_steps,
    differentiated,
    lengths_mask,
    tokens,
)
from tests.support.numerics import assert_same_model

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.15,
    "pad_token_id": 0,
}


def both(name: str, **config):
    """The model with eager attention and with ours."""
    from biased_flash_attn.integrations.transformers import NAME

    kind, config = name.partition("For")[0].removesuffix("Model"), {**SHAPE, **config}
    config = getattr(transformers, f"{kind}Config")(**config)
    model = getattr(transformers, name)
    theirs = model._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ours = model._from_config(copy.deepcopy(config), attn_implementation=NAME).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def registered(interface: type):
    """What our name stands for."""
    from biased_flash_attn.integrations.transformers import NAME

    return interface()[NAME]


def llama(**config):
    return both("LlamaForCausalLM", num_key_value_heads=2, **config)


def mistral(window: int):
    return both("MistralForCausalLM", num_key_value_heads=2, sliding_window=window)


def assert_same_training(ours, theirs, mask, length: int) -> None:
    inputs = {"input_ids": tokens(3, length), "attention_mask": mask}
    kept = torch.ones(3, length, dtype=torch.bool) if mask is None else mask.bool()
    logits, gradients = differentiated(ours, inputs, kept)
    expected, expected_gradients = differentiated(theirs, inputs, kept)
    assert_same_model(logits, expected, "logits")
    for name, gradient in expected_gradients.items():
        assert_same_model(gradients[name], gradient, f"gradient of {name}")


@pytest.mark.parametrize("side", ["none", "left", "right", "both", "between"])
def test_grouped_query_attention(side):
    assert_same_training(*llama(), lengths_mask(side, 3, 60), 60)


@pytest.mark.parametrize("side", ["none", "left", "right", "both", "between"])
@pytest.mark.parametrize("window", [7, 100])
def test_sliding_window(side, window):
    assert_same_training(*mistral(window), lengths_mask(side, 3, 60), 60)


@pytest.mark.parametrize("side", ["none", "left", "right", "between"])
def test_both_directions(side):
    ours, theirs = both("BertModel", max_position_embeddings=64)
    mask, ids = lengths_mask(side, 3, 60), tokens(3, 60)
    kept = torch.ones(3, 60, dtype=torch.bool) if mask is None else mask.bool()
    with torch.no_grad():
        results = [m(ids, attention_mask=mask).last_hidden_state[kept] for m in (ours, theirs)]
    assert_same_model(*results, "hidden states")


@pytest.mark.parametrize("make", [llama, lambda: mistral(9)], ids=["llama", "mistral"])
def test_generation(make):
    """A sliding cache discards keys that are outside its window."""
    mask = lengths_mask("left", 3, 20)
    inputs = {"input_ids": tokens(3, 20) * mask, "attention_mask": mask}
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    ours, theirs = (m.generate(**inputs, **options) for m in make())
    assert_same_steps(ours, theirs)


@pytest.mark.parametrize("side", ["none", "left", "between"])
@pytest.mark.parametrize("make", [llama, lambda: mistral(9)], ids=["llama", "mistral"])
def test_attention_weights(make, side):
    mask, ids = lengths_mask(side, 3, 30), tokens(3, 30)
    kept = torch.ones(3, 30, dtype=torch.bool) if mask is None else mask.bool()
    options = {"attention_mask": mask, "output_attentions": True}
    for layer in zip(*(m(ids, **options).attentions for m in make()), strict=True):
        assert_same_model(*(x.transpose(1, 2)[kept] for x in layer), "weights")


@pytest.mark.parametrize("window", [None, 9, 100])
def test_sequences_packed_by_position_ids_are_refused(window):
    ours, _ = llama() if window is None else mistral(window)
    positions = torch.arange(20).repeat(3)[None]
    with pytest.raises(NotImplementedError, match="packed by position_ids"):
        ours(tokens(1, 60), position_ids=positions, use_cache=False)


def test_chunks_are_refused():
    """Within the first chunk, the mask is causal."""
    make = registered(transformers.AttentionMaskInterface)
    chunks = transformers.masking_utils.chunked_causal_mask_function(
        8, torch.zeros(2, dtype=torch.int64)
    )
    assert make(2, 8, 8, mask_function=chunks, local_size=8).causal
    with pytest.raises(NotImplementedError, match="last 8 keys"):
        make(2, 30, 30, mask_function=chunks, local_size=8)


@pytest.mark.parametrize(
    "sees",
    [
        lambda q, k: (k <= q) & (k > q - 4) & ((k < q) | (q == 0)),
        lambda q, k: (k <= q) & (k > q - 3),
        lambda q, k: (k <= q) & (k > q - 5),
        lambda q, k: (k - q).abs() < 4,
    ],
    ids=["not its own key", "fewer keys", "more keys", "both sides"],
)
def test_windows_of_other_keys_are_refused(sees):
    make = registered(transformers.AttentionMaskInterface)

    def window(sees):
        return make(2, 9, 9, mask_function=lambda b, h, q, k: sees(q, k) & (b >= 0), local_size=4)

    assert window(lambda q, k: (k <= q) & (k > q - 4)).window == 4
    with pytest.raises(NotImplementedError, match="last 4 keys"):
        window(sees)


def test_masks_of_pairs_are_refused():
    ours, _ = llama()
    mask = torch.zeros(3, 1, 20, 20)
    with pytest.raises(NotImplementedError, match=r"attention_mask has shape \(3, 1, 20, 20\)"):
        ours(tokens(3, 20), attention_mask=mask)


@pytest.mark.parametrize("make", [llama, lambda: mistral(9)], ids=["llama", "mistral"])
def test_static_caches_are_refused(make):
    ours, _ = make()
    with pytest.raises(NotImplementedError, match="static caches are not supported"):
        ours.generate(tokens(2, 20), max_new_tokens=4, cache_implementation="static")
    options = {"attention_mask": lengths_mask("left", 2, 20), "cache_implementation": "static"}
    with pytest.raises(NotImplementedError, match="static caches are not supported"):
        ours.generate(tokens(2, 20), max_new_tokens=4, pad_token_id=0, **options)


def test_dropout_is_refused_in_training():
    ours, _ = llama(attention_dropout=0.1)
    ours(tokens(1, 9))
    with pytest.raises(NotImplementedError, match=r"attention dropout is 0\.1"):
        ours.train()(tokens(1, 9))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("softcap", 30.0),
        ("s_aux", torch.zeros(4)),
        ("sinks", torch.zeros(1, 4, 9, 1)),
        ("head_mask", torch.ones(4)),
        ("indices", torch.zeros(1, 9, 4, dtype=torch.int32)),
        ("block_indices", torch.zeros(1, 2, 9, 4, dtype=torch.int64)),
        ("cu_seq_lens_q", torch.tensor([0, 9])),
        ("position_bias", torch.zeros(1, 4, 9, 9)),
        ("cache", object()),  # of continuous batching
    ],
)
@pytest.mark.parametrize("head_dim", [16, 320])
def test_unsupported_arguments_are_refused(name, value, head_dim):
    q = torch.randn(1, 4, 9, head_dim)
    attend = registered(transformers.AttentionInterface)
    with pytest.raises(NotImplementedError, match=name):
        attend(torch.nn.Module(), q, q, q, None, is_causal=False, **{name: value})


@pytest.mark.parametrize("option", ["is_causal", "output_attentions"])
def test_wide_heads_are_refused(option):
    """Except without a mask and a bias, as Inkling 2 has them."""
    q = torch.randn(1, 4, 9, 520)
    attend = registered(transformers.AttentionInterface)
    with pytest.raises(ValueError, match="q has head_dim 520"):
        attend(torch.nn.Module(), q, q, q, None, **{"is_causal": False, option: True})


@pytest.mark.parametrize("head_dim", [16, 320])
def test_bidirectional_windows_are_refused(head_dim):
    q = torch.randn(1, 4, 9, head_dim)
    attend = registered(transformers.AttentionInterface)
    with pytest.raises(NotImplementedError, match="sliding_window"):
        attend(torch.nn.Module(), q, q, q, None, is_causal=False, sliding_window=4)


def test_inconsistent_windows_are_refused():
    q, mask = torch.randn(1, 4, 9, 16), registered(transformers.AttentionMaskInterface)(1, 9, 9)
    attend = registered(transformers.AttentionInterface)
    with pytest.raises(ValueError, match="sliding_window is 4"):
        attend(torch.nn.Module(), q, q, q, mask, sliding_window=4)


def test_t5_selected_only_by_name_is_refused():
    """Its bias would be dense."""
    ours, _ = both("T5Model", d_model=64, d_kv=16, d_ff=64, num_heads=4, num_layers=1)
    with pytest.raises(NotImplementedError, match=r"transformers\.accelerate"):
        ours(tokens(1, 9), decoder_input_ids=tokens(1, 9))
