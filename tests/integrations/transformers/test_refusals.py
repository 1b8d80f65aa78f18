"""`accelerate` refuses unsupported models, and leaves them unchanged."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import transformers

from tests.integrations.transformers.cases import (
    accelerate,
    accelerated,
    bloom,
    decoder,
    falcon,
    inkling,
    inkling2,
    inputs_of,
    lengths_mask,
    mpnet,
    mpt,
    t5,
    tokens,
    unaccelerate,
)


class Pipeline:
    """Holds a model and is no module."""

    def __init__(self, model):
        self.model = model


def assert_refused(model, match: str) -> None:
    """Acceleration raises an error, and leaves the model unchanged."""
    kinds = [type(module) for module in model.modules()]
    configs = [getattr(module, "config", None) for module in model.modules()]
    implementation, hooks = model.config._attn_implementation, len(model._forward_pre_hooks)
    with pytest.raises(NotImplementedError, match=match):
        accelerate(model)
    assert kinds == [type(module) for module in model.modules()]
    assert all(
        getattr(module, "config", None) is config
        for module, config in zip(model.modules(), configs, strict=True)
    )
    assert model.config._attn_implementation == implementation
    assert len(model._forward_pre_hooks) == hooks


def test_other_architectures():
    shape = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64}
    model = decoder("Llama", num_hidden_layers=1, **shape)
    assert_refused(model, 'BLOOM, MPT, Falcon.*attn_implementation="biased_attention"')
    for holder, name in ((torch.nn.Sequential(model), "Sequential"), (Pipeline(model), "Pipeline")):
        with pytest.raises(NotImplementedError, match=f"^LlamaForCausalLM in {name} has no atten"):
            accelerate(holder)
    assert_refused(
        model, "^LlamaForCausalLM has no .*; nothing was changed, and LlamaForCausalLM works"
    )


def test_falcon_without_alibi():
    assert_refused(falcon(alibi=False), "rotary")


def test_cpm_ant():
    shape = {"hidden_size": 32, "num_attention_heads": 2, "dim_head": 16, "dim_ff": 32}
    model = decoder("CpmAnt", num_hidden_layers=1, **shape)
    assert_refused(model, "CpmAntForCausalLM is not supported: CPM-Ant's bias.*segments")


def test_projections_in_slices():
    assert_refused(decoder("Bloom", pretraining_tp=2, slow_but_exact=True), "slow_but_exact")


def test_modified_layers():
    model = bloom()
    layer = model.transformer.h[1].self_attention
    layer.forward = layer.forward
    assert_refused(model, "forward of BloomForCausalLM's BloomAttention has been replaced")
    layer.__class__ = type("MyAttention", (type(layer),), {})
    assert_refused(model, "MyAttention")


def test_other_types():
    linear = torch.nn.Linear(2, 2)
    for model in (linear, lambda x: x, Pipeline(linear), Pipeline("bloom")):
        with pytest.raises(TypeError, match=f"model is a {type(model).__name__};"):
            accelerate(model)
    for model in (lambda x: x, Pipeline("bloom")):
        with pytest.raises(TypeError, match=f"model is a {type(model).__name__};"):
            unaccelerate(model)


@pytest.mark.parametrize("make", [bloom, mpt, falcon, inkling, inkling2, mpnet, t5])
def test_masks_of_pairs_are_refused(make):
    model = accelerated(make())
    with pytest.raises(NotImplementedError, match=r"attention_mask has shape \(2, 1, 9, 9\)"):
        model(**inputs_of(model, 2, 9) | {"attention_mask": torch.zeros(2, 1, 9, 9)})


@pytest.mark.parametrize("make", [bloom, mpt, falcon, inkling, inkling2])
def test_masks_of_another_length_are_refused(make):
    model = accelerated(make())
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 8\)"):
        model(**inputs_of(model, 2, 9) | {"attention_mask": torch.ones(2, 8)})


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("make", [bloom, mpt, falcon, inkling, inkling2, mpnet, t5])
def test_masks_of_another_batch_are_refused(make, batch):
    model = accelerated(make())
    with pytest.raises(ValueError, match=rf"attention_mask has shape \({batch}, 9\).*\(2, 9\)"):
        model(**inputs_of(model, 2, 9) | {"attention_mask": torch.ones(batch, 9).tril(5)})


@pytest.mark.parametrize("length", [8, 12])
def test_cross_attention_masks_of_another_length_are_refused(length):
    model, inputs = (
        accelerated(t5()),
        {"input_ids": tokens(2, 9), "decoder_input_ids": tokens(2, 7)},
    )
    mask = torch.ones(2, length).tril(5)
    with pytest.raises(ValueError, match=f"attention_mask is of {length} keys.* of 9 keys"):
        model(**inputs, attention_mask=mask)
    states = model.encoder(inputs["input_ids"]).last_hidden_state
    with pytest.raises(ValueError, match=f"attention_mask is of {length} keys.* of 9 keys"):
        model(**inputs, encoder_outputs=(states,), attention_mask=mask)


def mpt_with_dropout():
    """Its config accepts only integers."""
    model = mpt()
    model.transformer.blocks[1].attn.attn_dropout_p = 0.1
    return model


@pytest.mark.parametrize(
    "model",
    [
        lambda: decoder("Bloom", attention_dropout=0.1),
        mpt_with_dropout,
        lambda: falcon(attention_dropout=0.1),
        lambda: inkling(attention_dropout=0.1),
        lambda: inkling2(attention_dropout=0.1),
        lambda: mpnet(attention_probs_dropout_prob=0.1),
        t5,
    ],
    ids=["bloom", "mpt", "falcon", "inkling", "inkling 2", "mpnet", "t5"],
)
def test_dropout_is_refused_in_training(model):
    model = accelerated(model())
    model(**inputs_of(model, 2, 9))
    with pytest.raises(NotImplementedError, match=r"attention dropout is 0\.1.*Attention layers"):
        model.train()(**inputs_of(model, 2, 9))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_other_implementations_are_refused_after_acceleration(implementation):
    model = accelerated(t5())
    model.set_attn_implementation(implementation)
    with pytest.raises(NotImplementedError, match=f"^attn_implementation is '{implementation}'"):
        model(**inputs_of(model, 2, 9))


@pytest.mark.parametrize("make", [bloom, mpt, falcon, inkling, inkling2])
def test_static_caches_are_refused(make):
    model = accelerated(make())
    cache = transformers.StaticCache(model.config, max_cache_len=20)
    with pytest.raises(NotImplementedError, match="static caches are not supported"):
        model(tokens(2, 9), cache=cache)


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("make", [bloom, inkling2, t5])
def test_generation_with_static_caches_is_refused(make, side):
    model, mask = accelerated(make()), lengths_mask(side, 2, 9)
    options = {"attention_mask": mask, "cache_implementation": "static", "pad_token_id": 0}
    with pytest.raises(NotImplementedError, match="static caches are not supported"):
        model.generate(tokens(2, 9), max_new_tokens=4, **options)


def run(program: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_the_package_does_not_import_transformers():
    done = run("import sys, biased_flash_attn; assert 'transformers' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_the_error_without_transformers_names_the_remedy():
    done = run(
        "import sys; sys.modules['transformers'] = None;"
        "import biased_flash_attn.integrations.transformers"
    )
    assert "pip install 'biased-flash-attn[transformers]'" in done.stderr


def test_older_versions_are_refused():
    done = run(
        "import transformers; transformers.__version__ = '5.23.9';"
        "import biased_flash_attn.integrations.transformers"
    )
    assert "transformers is 5.23.9; it must be 5.24 or newer" in done.stderr
