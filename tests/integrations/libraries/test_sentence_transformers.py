"""SentenceTransformers of MPNet and of T5's encoder."""

from __future__ import annotations

import pytest
import torch

from tests.integrations.libraries.cases import save_mpnet, save_t5, texts
from tests.integrations.transformers.cases import accelerate, unaccelerate
from tests.support.numerics import assert_same_model

# Importing sentence-transformers takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(params=["mpnet", "t5"])
def model(request, tmp_path):
    from sentence_transformers import SentenceTransformer

    if request.param == "mpnet":
        save_mpnet(tmp_path, "Model")
    else:
        save_t5(tmp_path)
    return SentenceTransformer(str(tmp_path))


def lengths() -> list[int]:
    """From one word to most that a model takes, in any order."""
    return [1, 400, *torch.randint(2, 200, (8,)).tolist()]


@pytest.mark.parametrize("normalize", [False, True])
def test_encode(model, normalize):
    options = {
        "batch_size": 4,
        "normalize_embeddings": normalize,
        "show_progress_bar": True,
        "convert_to_tensor": True,
    }
    inputs = texts(*lengths())
    expected = model.encode(inputs, **options)
    assert accelerate(model) is model
    actual = model.encode(inputs, **options)
    assert_same_model(actual, expected, "embeddings")
    for text, embedding in zip(inputs, actual, strict=True):
        alone = model.encode(text, **options | {"show_progress_bar": False})
        assert_same_model(embedding, alone, "embedding of one text")
    assert expected.std(0).min() > 1e-3
    assert torch.equal(unaccelerate(model).encode(inputs, **options), expected)


def test_embeddings_of_tokens(model):
    inputs = texts(*lengths())
    expected = model.encode(inputs, batch_size=4, output_value="token_embeddings")
    actual = accelerate(model).encode(inputs, batch_size=4, output_value="token_embeddings")
    for ours, theirs in zip(actual, expected, strict=True):
        assert_same_model(ours, theirs, "embeddings of tokens")
