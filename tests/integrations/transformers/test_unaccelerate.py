"""`unaccelerate` gives a model back as it was."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from tests.integrations.transformers.cases import (
    accelerate,
    accelerated,
    bloom,
    falcon,
    inkling,
    inkling2,
    inputs_of,
    mpnet,
    mpt,
    t5,
    unaccelerate,
)

MODELS = [bloom, mpt, falcon, inkling, inkling2, mpnet, t5, lambda: t5("UMT5")]


def state_of(model) -> list[tuple]:
    """The class of each module, the names of its attributes, its config and its hooks."""
    return [
        (
            type(module),
            sorted(vars(module)),
            sorted(module._modules),
            {name: x for name, x in vars(module).items() if isinstance(x, (bool, int, float))},
            module.config.to_dict() if hasattr(module, "config") else None,
            getattr(getattr(module, "config", None), "_attn_implementation", None),
            [len(hooks) for name, hooks in vars(module).items() if name.endswith("_hooks")],
            len(module._forward_pre_hooks_with_kwargs),
        )
        for module in model.modules()
    ]


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("through", [lambda x: x, copy.deepcopy, saved_and_loaded])
def test_the_model_is_as_before(make, through):
    model = make()
    before, inputs = state_of(model), inputs_of(model, 2, 9)
    expected = model(**inputs).logits
    accelerate(model)
    model(**inputs)
    assert state_of(model) != before
    model = through(model)
    assert unaccelerate(model) is model
    assert state_of(model) == before
    assert torch.equal(model(**inputs).logits, expected)


@pytest.mark.parametrize("make", MODELS)
def test_again(make):
    model = accelerated(make())
    inputs = inputs_of(model, 2, 9)
    expected = model(**inputs).logits
    accelerate(unaccelerate(model))
    assert torch.equal(model(**inputs).logits, expected)


def test_models_that_are_not_accelerated():
    model = bloom()
    before = state_of(model)
    assert unaccelerate(unaccelerate(model)) is model
    assert state_of(model) == before


def test_parts():
    """A decoder stays accelerated if only its encoder is given back."""
    model = t5()
    before, of_encoder = state_of(model), state_of(model.encoder)
    accelerate(model.encoder)
    accelerate(model)
    of_decoder = state_of(accelerate(model.decoder))
    unaccelerate(model.encoder)
    assert state_of(model.encoder) == of_encoder
    assert state_of(model.decoder) == of_decoder
    assert state_of(unaccelerate(model)) == before


def test_changes_to_the_config_are_kept():
    model = accelerate(bloom())
    model.resize_token_embeddings(50)
    assert unaccelerate(model).config.vocab_size == 50
