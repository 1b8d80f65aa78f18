"""Padded batches: results of each sequence are those of the sequence alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from biased_flash_attn.nn import CausalLM
from tests.nn.models import EVERY_MODEL, VOCABULARY, causal_lm, check_each_alone

RANGES = ((0, 16), (0, 9), (5, 16), (3, 13), (4, 4))  # tokens of each row


def mask_of(ranges: tuple[tuple[int, int], ...], length: int) -> Tensor:
    j = torch.arange(length)
    return torch.stack([(first <= j) & (j < end) for first, end in ranges])


@pytest.mark.parametrize(("make", "scheme"), EVERY_MODEL)
def test_logits_and_gradients_of_tokens_are_those_without_padding(make, scheme):
    model = make(scheme)
    tokens = torch.randint(VOCABULARY, (len(RANGES), 16))
    padded = model(tokens, key_padding_mask=mask_of(RANGES, 16))
    assert padded.isfinite().all()
    kept = [(b, slice(*of_row)) for b, of_row in enumerate(RANGES) if of_row[0] < of_row[1]]
    check_each_alone(model, padded, tokens, kept)


def test_padding_does_not_count_towards_the_longest_length():
    model = CausalLM(VOCABULARY, 24, 1, 4, "learned", max_length=5)
    tokens = torch.randint(VOCABULARY, (2, 8))
    assert model(tokens, key_padding_mask=mask_of(((0, 5), (4, 8)), 8)).shape == (2, 8, VOCABULARY)
    with pytest.raises(ValueError, match=r"^tokens has a sequence of 6; learned positions"):
        model(tokens, key_padding_mask=mask_of(((0, 5), (2, 8)), 8))


@pytest.mark.parametrize("scheme", ["alibi", "learned"])
def test_invalid_masks_are_refused(scheme):
    model, tokens = causal_lm(scheme), torch.zeros(1, 3, dtype=torch.long)
    for mask, error, message in (
        ([True] * 3, TypeError, "key_padding_mask is a list"),
        (torch.ones(1, 3), TypeError, "key_padding_mask is torch.float32; it must be torch.bool"),
        (torch.ones(1, 4).bool(), ValueError, r"key_padding_mask has shape \(1, 4\)"),
        (torch.tensor([[True, False, True]]), ValueError, "key_padding_mask has padding between"),
    ):
        with pytest.raises(error, match="^" + message):
            model(tokens, key_padding_mask=mask)
    with torch.no_grad(), pytest.raises(ValueError, match=r"^key_padding_mask is given with a ca"):
        model(tokens, model.make_caches(1), key_padding_mask=torch.ones(1, 3).bool())
