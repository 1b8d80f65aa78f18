"""Parameters, configs, copies and files of accelerated models."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import transformers

from tests.integrations.transformers.cases import (
    accelerate,
    accelerated,
    bloom,
    differentiated,
    falcon,
    inkling,
    inkling2,
    inputs_of,
    kept_by,
    mpnet,
    mpt,
    t5,
    tokens,
    with_adapters,
)
from tests.support.numerics import assert_same_model


@pytest.mark.parametrize("make", [bloom, inkling, inkling2])
def test_acceleration_is_idempotent(make):
    model = accelerated(make())
    config, hooks = model.config, len(model.base_model._forward_pre_hooks)
    assert accelerate(model) is model
    assert model.config is config
    assert len(model.base_model._forward_pre_hooks) == hooks


def test_a_part_may_be_accelerated_first():
    model = t5()
    expected = accelerated(model)
    accelerate(model.encoder)
    accelerate(model)
    inputs = inputs_of(model, 2, 9)
    assert [type(x) for x in model.modules()] == [type(x) for x in expected.modules()]
    assert torch.equal(model(**inputs).logits, expected(**inputs).logits)


@pytest.mark.parametrize("make", [mpnet, t5])
def test_adapters_of_tables_take_part(make):
    model = with_adapters(make())
    inputs, kept = inputs_of(model, 2, 9), kept_by(None, 2, 9)
    (actual, gradients), (logits, expected) = (
        differentiated(run, inputs, kept) for run in (accelerated(model), model)
    )
    assert_same_model(actual, logits, "logits")
    adapted = [name for name in gradients if name.endswith((".a", ".b"))]
    assert adapted
    for name in adapted:
        assert_same_model(gradients[name], expected[name], f"gradient of {name}")


@pytest.mark.parametrize("make", [bloom, mpt, falcon, inkling, inkling2, mpnet, t5])
def test_parameters_and_other_models_are_unchanged(make):
    """Two models may share a config."""
    config = make().config
    model, other = (transformers.AutoModel.from_config(config) for _ in range(2))
    if make is not t5:
        other.config = model.config
    names = [*model.state_dict()]
    accelerate(model)
    assert [*model.state_dict()] == names
    inputs = {"input_ids": tokens(2, 9)}
    if make is t5:
        inputs["decoder_input_ids"] = tokens(2, 9)
    other.eval()(**inputs)
    assert config._attn_implementation != model.config._attn_implementation


@pytest.mark.parametrize("make", [bloom, mpt, falcon, inkling, inkling2])
def test_models_with_a_shared_config_are_independent(make):
    """Until it is accelerated, its layers do not select attention by name."""
    model = accelerated(make())
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    inputs = inputs_of(model, 2, 9)
    with pytest.raises(NotImplementedError, match=r"transformers\.accelerate"):
        other(**inputs)
    assert torch.equal(accelerate(other)(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("make", [bloom, mpt, falcon, inkling, inkling2, mpnet, t5])
def test_copies_and_files(make):
    model = accelerated(make())
    inputs = inputs_of(model, 2, 9)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.no_grad():
        expected = model(**inputs).logits
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert torch.equal(other(**inputs).logits, expected)


@pytest.mark.parametrize("make", [bloom, mpt, falcon, inkling, inkling2, mpnet, t5])
def test_acceleration_is_not_saved(make, tmp_path):
    plain = make()
    model, inputs = accelerated(plain), inputs_of(plain, 2, 9)
    model.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path)
    assert [type(x) for x in loaded.modules()] == [type(x) for x in plain.modules()]
    with torch.no_grad():
        assert_same_model(loaded(**inputs).logits, plain(**inputs).logits, "logits")
        assert torch.equal(accelerate(loaded)(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("make", [bloom, mpt, inkling2, mpnet, t5])
def test_models_whose_parameters_are_loaded_later(make):
    expected = accelerated(make())
    with torch.device("meta"):
        model = accelerate(make())
    model.load_state_dict(expected.state_dict(), assign=True)
    model.tie_weights()
    inputs = inputs_of(model, 2, 9)
    assert torch.equal(model(**inputs).logits, expected(**inputs).logits)


@pytest.mark.parametrize("make", [bloom, mpt, inkling2, mpnet, t5, lambda: t5("UMT5")])
def test_models_without_memory_are_initialized_later(make):
    """The parameters are drawn as those of a model that is accelerated afterwards."""
    with torch.device("meta"):
        plain = make()
        model = accelerated(plain)
    for m in (plain, model):
        m.to_empty(device="cpu")
        torch.manual_seed(0)
        m.init_weights()
    inputs = inputs_of(model, 2, 9)
    logits = model(**inputs).logits
    assert logits.isfinite().all()
    assert torch.equal(logits, accelerate(plain)(**inputs).logits)
