"""What models predict: the next token, or tokens that are masked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...nn import CausalLM, Encoder
from ..perplexity import BATCH_TOKENS, segment_losses, token_losses
from ..training.loop import IGNORED
from .counts import ORDER, losses_of_counts

RATE = 0.15  # of the tokens are masked (Devlin et al., 2019)


class Objective(ABC):
    """What models predict, and how it is evaluated: the same tokens at every length.

    model: the class of the models. models: what these are called.
    causal: whether they see earlier tokens only, which windows, caches and receptive fields need.
    own_tokens: how many tokens models have beyond those of the text.
    shortest: the least length for evaluation.
    unscored: how many tokens of a window of the least length are not scored.
    """

    model: ClassVar[type[nn.Module]]
    models: ClassVar[str]
    causal: ClassVar[bool]
    own_tokens: ClassVar[int]
    shortest: ClassVar[int]
    unscored: ClassVar[int]

    @abstractmethod
    def examples(
        self, segments: Tensor, vocabulary: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Tokens and targets, (B, N) int64, of segments (B, N + 1)."""

    @abstractmethod
    def losses(
        self, model: nn.Module, segments: Tensor, length: int, scored: int, vocabulary: int
    ) -> Tensor:
        """Losses (B, K) float64 of a model that sees `length` tokens of segments (B, N + 1)."""

    @abstractmethod
    def counted(self, train: Tensor, segments: Tensor, scored: int, vocabulary: int) -> Tensor:
        """Losses of the same tokens by the model of counts, (B, K) float64."""

    @abstractmethod
    def predicted(self, scored: int) -> int:
        """K, the number of tokens of a window that are predicted."""

    @abstractmethod
    def protocol(self, scored: int, unit: str) -> str:
        """Which tokens are predicted, the end of a sentence."""

    @abstractmethod
    def context_of_counts(self, unit: str) -> str:
        """What the model of counts knows, the end of a sentence."""


class NextToken(Objective):
    """Causal models predict the last tokens of a window, each from those before it."""

    model = CausalLM
    models = "causal models"
    causal = True
    own_tokens = 0
    shortest = ORDER
    unscored = ORDER - 1

    def examples(self, segments, vocabulary, generator):
        tokens = segments.long()
        return tokens[:, :-1], tokens[:, 1:]

    def losses(self, model, segments, length, scored, vocabulary):
        return segment_losses(model, segments, length, scored)

    def counted(self, train, segments, scored, vocabulary):
        return losses_of_counts(train, segments[:, -scored - ORDER :], vocabulary)

    def predicted(self, scored):
        return scored

    def protocol(self, scored, unit):
        return f"{scored} at a time, the last of which has the whole context"

    def context_of_counts(self, unit):
        return f"the {ORDER} {unit} before"


class MaskedTokens(Objective):
    """Encoders predict masked tokens in the middle of a window, from both sides.

    A token of its own replaces all masked tokens, and in windows for evaluation also others
    outside of the middle, at the same rate as in training.
    """

    model = Encoder
    models = "encoders"
    causal = False
    own_tokens = 1
    shortest = 2 * ORDER - 1
    unscored = 2 * (ORDER - 1)

    def examples(self, segments, vocabulary, generator):
        tokens = segments[:, 1:].long()
        masked = _drawn(tokens.shape, generator)
        return tokens.masked_fill(masked, vocabulary), tokens.masked_fill(~masked, IGNORED)

    def losses(self, model, segments, length, scored, vocabulary):
        tokens = segments[:, 1:].int()
        masked, middle = _masks(tokens.shape, scored)
        wanted = masked & middle
        window = _middle(tokens.shape[1], length)
        inputs = tokens.masked_fill(masked, vocabulary)[:, window]
        targets = tokens.masked_fill(~wanted, IGNORED)[:, window]
        batch = max(1, BATCH_TOKENS // length)
        batches = zip(inputs.split(batch), targets.split(batch), strict=True)
        losses = torch.cat(list(token_losses(model, batches, len(tokens))))
        return losses[wanted[:, window]].view(len(tokens), -1)

    def counted(self, train, segments, scored, vocabulary):
        shape = len(segments), segments.shape[1] - 1
        masked, middle = _masks(shape, scored)
        place = _middle(shape[1], scored)
        context = segments[:, place.start + 1 - ORDER : place.stop + 1]
        losses = losses_of_counts(train, context, vocabulary)
        return losses[(masked & middle)[:, place]].view(len(segments), -1)

    def predicted(self, scored):
        return _count(scored)

    def protocol(self, scored, unit):
        return (
            f"{_count(scored)} of the {scored} in the middle of each window, which are masked like"
            f" {RATE:.0%} of all {unit}"
        )

    def context_of_counts(self, unit):
        return f"the {ORDER} {unit} before, even masked ones, and none of those after"


OBJECTIVES: dict[str, Objective] = {"causal": NextToken(), "masked": MaskedTokens()}


def _drawn(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Random masks, of as many tokens in each row, (B, N) bool."""
    return torch.rand(shape, generator=generator).argsort(1) < _count(shape[1])


def _count(tokens: int) -> int:
    return max(1, round(RATE * tokens))


def _middle(whole: int, part: int) -> slice:
    start = (whole - part) // 2
    return slice(start, start + part)


def _masks(shape: tuple[int, int], scored: int) -> tuple[Tensor, Tensor]:
    """The masked tokens of windows for evaluation, and which are in the middle, (B, N) bool."""
    generator = torch.Generator().manual_seed(0)
    masked, middle = _drawn(shape, generator), torch.zeros(shape, dtype=torch.bool)
    place = _middle(shape[1], scored)
    masked[:, place] = _drawn((shape[0], scored), generator)
    middle[:, place] = True
    return masked, middle
