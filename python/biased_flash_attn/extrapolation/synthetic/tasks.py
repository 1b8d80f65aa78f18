"""Tasks whose optimum is known: the best prediction of every token, given those before it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..training.loop import IGNORED

SCORED = 8  # predictions of a window, the last ones


@dataclass(frozen=True, eq=False)
class Window:
    """The end of documents, of which a model predicts what follows the last tokens.

    tokens: (B, N) int64.
    truth: (B, K, V) float64, the distribution of what follows each of the last K tokens.
    optimum: (B, K, V) float64, the prediction with the least expected loss of those that know
        `tokens`, and how documents are drawn.
    """

    tokens: Tensor
    truth: Tensor
    optimum: Tensor


class Documents(ABC):
    """Documents for evaluation."""

    @abstractmethod
    def window(self, length: int) -> Window:
        """The last `length` tokens of each document."""


class Task(ABC):
    """Random documents, and what should be predicted.

    vocabulary: the number of different tokens, which are targets as well.
    shortest: the least length of sequences.
    optimum_improves: whether the best prediction improves with the context.
    """

    shortest: ClassVar[int]
    optimum_improves: ClassVar[bool]

    @property
    @abstractmethod
    def vocabulary(self) -> int: ...

    @abstractmethod
    def batch(self, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Tokens and targets for training, (count, length) int64 each."""

    @abstractmethod
    def documents(
        self, count: int, lengths: Sequence[int], generator: torch.Generator
    ) -> Documents:
        """Documents whose windows have these lengths, ascending."""


class Parity(Task):
    """Random bits, of which a model predicts whether the number of ones so far is odd.

    Every bit matters equally, however far away it is (Chi et al., 2023, "Limitations").
    """

    vocabulary = 2
    shortest = SCORED
    optimum_improves = False

    def batch(self, count, length, generator):
        bits = torch.randint(2, (count, length), generator=generator)
        return bits, bits.cumsum(1) % 2

    def documents(self, count, lengths, generator):
        return Bits(self.batch(count, lengths[-1], generator)[0])


@dataclass(frozen=True, eq=False)
class Bits(Documents):
    tokens: Tensor

    def window(self, length):
        bits = self.tokens[:, -length:]
        parity = F.one_hot(bits.cumsum(1)[:, -SCORED:] % 2, Parity.vocabulary).double()
        return Window(bits, parity, parity)


class Recall(Task):
    """Random symbols, one of which follows a marker; each query after it asks for this symbol.

    For evaluation, the marker is at the beginning of the window, and the query at its end.
    """

    SYMBOLS = 16
    MARKER, QUERY = SYMBOLS, SYMBOLS + 1
    QUERIES = 0.25  # of the tokens after the marked symbol

    vocabulary = SYMBOLS + 2
    shortest = 3
    optimum_improves = False

    def batch(self, count, length, generator):
        symbols = torch.randint(self.SYMBOLS, (count, length), generator=generator)
        marker = torch.randint(length - 2, (count, 1), generator=generator)
        after = torch.arange(length) - marker  # tokens after the marker
        drawn = torch.rand(count, length, generator=generator) < self.QUERIES
        drawn[:, -1] = True
        asked = drawn & (after > 1)
        tokens = symbols.masked_fill(asked, self.QUERY).masked_fill(after == 0, self.MARKER)
        return tokens, symbols.gather(1, marker + 1).where(asked, IGNORED)

    def documents(self, count, lengths, generator):
        symbols = torch.randint(self.SYMBOLS, (count, lengths[-1]), generator=generator)
        drawn = torch.rand(symbols.shape, generator=generator) < self.QUERIES
        drawn[:, -1] = True
        wanted = torch.randint(self.SYMBOLS, (count,), generator=generator)
        return Haystacks(symbols.masked_fill(drawn, self.QUERY), wanted)


@dataclass(frozen=True, eq=False)
class Haystacks(Documents):
    tokens: Tensor
    wanted: Tensor  # (B,)

    def window(self, length):
        tokens = self.tokens[:, -length:].clone()
        tokens[:, 0], tokens[:, 1] = Recall.MARKER, self.wanted
        answer = F.one_hot(self.wanted[:, None], Recall.vocabulary).double()
        return Window(tokens, answer, answer)
