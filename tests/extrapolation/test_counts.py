"""The model of counts, against sums over a text."""

from __future__ import annotations

import math

import pytest
import torch

from biased_flash_attn.extrapolation.experiment.counts import losses_of_counts


def probability(train: list[int], context: list[int], byte: int) -> float:
    """Of a byte after a context, by the interpolation of Witten and Bell."""
    shorter = probability(train, context[1:], byte) if context else 1 / 256
    n = len(context)
    followers = [train[i + n] for i in range(len(train) - n) if train[i : i + n] == context]
    if not followers:
        return shorter
    different = len(set(followers))
    return (followers.count(byte) + different * shorter) / (len(followers) + different)


@pytest.mark.parametrize("order", [0, 1, 3])
def test_losses_are_those_of_interpolated_counts(order):
    train, test = (torch.randint(97, 101, (n,)).to(torch.uint8) for n in (300, 40))
    train[::7], test[5] = 255, 0  # and a byte that training lacks
    letters, tested = train.tolist(), test.tolist()
    expected = [
        -math.log(probability(letters, tested[i - order : i], tested[i]))
        for i in range(order, len(tested))
    ]
    assert losses_of_counts(train, test, 256, order).tolist() == pytest.approx(expected, rel=1e-12)


def test_segments_are_counted_one_by_one():
    train, test = torch.randint(300, (500,)), torch.randint(300, (4, 20))
    together = losses_of_counts(train, test, 8192)
    assert torch.equal(together, torch.stack([losses_of_counts(train, t, 8192) for t in test]))
