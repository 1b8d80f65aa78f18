"""A model of counts, which every trained model should beat."""

from __future__ import annotations

import torch
from torch import Tensor

ORDER = 3  # tokens of context of the model


def losses_of_counts(train: Tensor, test: Tensor, vocabulary: int, order: int = ORDER) -> Tensor:
    """The loss of each token of a test text, given the `order` tokens before it, in nats.

    Counts of longer contexts are interpolated with those of shorter ones in proportion to the
    number of different tokens that follow a context (Witten and Bell, 1991). train: (T,), test:
    (..., T), integers below vocabulary, whose power order + 1 is below 2^63. Returns (..., T -
    order) float64, as the first `order` tokens are not predicted.
    """
    probabilities = torch.full_like(test[..., order:], 1 / vocabulary, dtype=torch.float64)
    for n in range(order + 1):
        seen, counts = windows(train, n + 1, vocabulary).unique(return_counts=True)
        contexts, followers = (seen // vocabulary).unique(return_counts=True)
        totals = torch.zeros_like(contexts).index_add_(
            0, torch.searchsorted(contexts, seen // vocabulary), counts
        )
        wanted = windows(test, n + 1, vocabulary)[..., order - n :]
        count = looked_up(seen, counts, wanted)
        total, different = (
            looked_up(contexts, values, wanted // vocabulary) for values in (totals, followers)
        )
        backing = different.clamp(min=1)  # of a new context, the shorter one decides
        probabilities = (count + backing * probabilities) / (total + backing)
    return -probabilities.log()


def windows(text: Tensor, width: int, vocabulary: int) -> Tensor:
    """All `width` consecutive tokens as one number, (..., T - width + 1) int64."""
    digits = vocabulary ** torch.arange(width).flip(0)
    return (text.long().unfold(-1, width, 1) * digits).sum(-1)


def looked_up(keys: Tensor, values: Tensor, wanted: Tensor) -> Tensor:
    """The value of each wanted key, and 0 for those that are not among the sorted keys."""
    place = torch.searchsorted(keys, wanted.contiguous()).clamp(max=len(keys) - 1)
    return torch.where(keys[place] == wanted, values[place], 0)
