"""Documents from random Markov chains, which a model learns from the context alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .tasks import SCORED, Documents, Task, Window

RESTARTS = 1 / 32  # per token


@dataclass(frozen=True)
class Markov(Task):
    """Each document has a Markov chain of its own, which its tokens reveal little by little.

    The next state depends on the last one by a matrix of transitions, whose rows are drawn
    uniformly from all distributions. With a small probability the chain restarts instead: a token
    of its own, the last one of the vocabulary, and then a state of which all are equally likely.
    Documents begin with this token.

    The best prediction follows from the numbers of transitions so far (Laplace's rule): a model
    should average over all earlier tokens that were preceded by the same state. As tokens before a
    restart say nothing about those after it but by the chain, a window that begins with a restart
    is like a document.
    """

    states: int = 4

    shortest = SCORED
    optimum_improves = True

    @property
    def vocabulary(self):
        return self.states + 1

    def batch(self, count, length, generator):
        tokens = draw(random_chains(count, self.states, generator), length + 1, (), generator)
        return tokens[:, :-1], tokens[:, 1:]

    def documents(self, count, lengths, generator):
        chains = random_chains(count, self.states, generator)
        restarts = [lengths[-1] - length for length in lengths]
        return Chains(chains, draw(chains, lengths[-1], restarts, generator))


@dataclass(frozen=True, eq=False)
class Chains(Documents):
    transitions: Tensor  # (B, V, V)
    tokens: Tensor  # (B, N)

    def window(self, length):
        tokens = self.tokens[:, -length:]
        truth = rows_of(self.transitions[:, None], tokens[:, -SCORED:])
        return Window(tokens, truth, optimum(tokens, self.transitions.shape[-1] - 1))


def random_chains(count: int, states: int, generator: torch.Generator) -> Tensor:
    """Transitions of tokens, those of restarts included, (count, V, V) float64."""
    weights = torch.empty(count, states, states, dtype=torch.float64)
    weights.exponential_(generator=generator)
    return with_restarts(weights / weights.sum(-1, keepdim=True))


def with_restarts(states: Tensor) -> Tensor:
    """Transitions of tokens (..., V, V), from those of states (..., V - 1, V - 1)."""
    start = torch.full_like(states[..., :1, :], 1 / states.shape[-1])
    rows = torch.cat([states, start], -2)
    restart = torch.full_like(rows[..., :1], RESTARTS)
    return torch.cat([(1 - RESTARTS) * rows, restart], -1)


def draw(
    transitions: Tensor, length: int, restarts: Sequence[int], generator: torch.Generator
) -> Tensor:
    """Tokens (B, length) of chains, which restart at the beginning and at the given places."""
    count, restart = len(transitions), transitions.shape[-1] - 1
    cumulative = transitions.cumsum(-1)
    uniform = torch.rand(count, length, 1, dtype=torch.float64, generator=generator)
    tokens = torch.full((count, length), restart)
    for n in range(1, length):
        if n not in restarts:
            # Without the last sum, which may be less than 1 by rounding.
            row = cumulative[torch.arange(count), tokens[:, n - 1], :-1]
            tokens[:, n] = (row <= uniform[:, n]).sum(-1)
    return tokens


def optimum(tokens: Tensor, states: int) -> Tensor:
    """The best prediction after each of the last tokens (B, N), (B, SCORED, V) float64."""
    before, after = (F.one_hot(t, states + 1) for t in (tokens[:, :-1], tokens[:, 1:]))
    first = tokens.shape[1] - SCORED
    seen = before[:, :first].double().mT @ after[:, :first].double()
    pairs = before[:, first:, :, None] * after[:, first:, None, :]
    later = torch.cat([torch.zeros_like(pairs[:, :1]), pairs], 1).cumsum(1)
    counts = (seen[:, None] + later)[..., :states, :states]
    expected = (counts + 1) / (counts.sum(-1, keepdim=True) + states)
    return rows_of(with_restarts(expected), tokens[:, first:])


def rows_of(transitions: Tensor, tokens: Tensor) -> Tensor:
    """The row of each token (B, K) in transitions (B, K or 1, V, V)."""
    size = transitions.shape[-1]
    wide = transitions.expand(-1, tokens.shape[1], -1, -1)
    return wide.gather(2, tokens[..., None, None].expand(-1, -1, 1, size))[:, :, 0]
