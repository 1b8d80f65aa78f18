"""The three protocols for perplexity, compared with single predictions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from biased_flash_attn.extrapolation import (
    last_token_perplexity,
    nonoverlapping_perplexity,
    perplexity,
    sliding_perplexity,
)

VOCABULARY = 7


class Toy(nn.Module):
    """Logits depend on the sum of all tokens so far, and so on every token of the context."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(101, VOCABULARY)
        self.dropout = nn.Dropout(0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.table((tokens + 1).cumsum(1) % 101))


def loss(model: Toy, context: list[int], token: int) -> float:
    weight = model.table.weight[sum(t + 1 for t in context) % 101]
    return -weight.log_softmax(-1)[token].item()


@pytest.fixture(params=[2**13, 40], ids=["one batch", "several"])
def model(request, monkeypatch) -> Toy:
    monkeypatch.setattr(perplexity, "BATCH_TOKENS", request.param)
    return Toy()


def check(found, losses: list[float]) -> None:
    mean = math.fsum(losses) / len(losses)
    assert found.tokens == len(losses)
    assert found.nats == pytest.approx(mean, rel=1e-6)
    assert found.value == pytest.approx(math.exp(mean), rel=1e-6)
    deviations = math.fsum((x - mean) ** 2 for x in losses) / len(losses)
    assert found.standard_error == pytest.approx(math.sqrt(deviations / len(losses)), rel=1e-4)


@pytest.mark.parametrize("length", [1, 5, 11])
def test_last_token_has_varied_context(model, length):
    segments = torch.randint(VOCABULARY, (9, 12))
    losses = [loss(model, s[-1 - length : -1], s[-1]) for s in segments.tolist()]
    check(last_token_perplexity(model, segments, length), losses)


@pytest.mark.parametrize("n", [2, 10, 11, 12, 30, 31, 37, 150])
@pytest.mark.parametrize(("length", "stride"), [(10, 10), (10, 3), (10, 1), (1, 1), (200, 7)])
def test_windows(model, n, length, stride):
    """A token belongs to the first window that reaches it."""
    tokens = torch.randint(VOCABULARY, (n,), dtype=torch.uint8)
    text, losses = tokens.tolist(), []
    for target in range(1, n):
        late = max(0, target - length)
        first = math.ceil(late / stride) * stride
        losses.append(loss(model, text[first:target], text[target]))
    check(sliding_perplexity(model, tokens, length, stride), losses)
    if stride == length:
        check(nonoverlapping_perplexity(model, tokens, length), losses)


def test_training_mode_is_restored(model):
    model.train()
    model.table.eval()
    nonoverlapping_perplexity(model, torch.randint(VOCABULARY, (50,)), 10)
    assert model.training
    assert model.dropout.training
    assert not model.table.training


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"length": 0}, ValueError, "length is 0; it may be 1 or more"),
        ({"length": 2.0}, TypeError, "length is 2.0; it must be an int, 1 or more"),
        ({"stride": 6}, ValueError, "stride is 6; it may be 1 to 5"),
        ({"tokens": torch.rand(9)}, TypeError, "tokens must be a tensor of integers"),
        ({"tokens": torch.ones(1).long()}, ValueError, r"tokens has shape \(1,\); it must be"),
        ({"model": torch.sin}, TypeError, "model is a builtin.*; it must be a torch.nn.Module"),
        ({"model": nn.Flatten(0, 1)}, ValueError, r"model returned \(5,\) for \(1, 5\)"),
    ],
)
def test_invalid_arguments_are_refused(change, error, message):
    arguments = {"model": Toy(), "tokens": torch.ones(9).long(), "length": 5, "stride": 5}
    with pytest.raises(error, match="^" + message):
        sliding_perplexity(**{**arguments, **change})


def test_last_token_refuses_lengths_beyond_the_segments():
    with pytest.raises(ValueError, match=r"^length is 9; it may be 1 to 8"):
        last_token_perplexity(Toy(), torch.ones(2, 9).long(), 9)
