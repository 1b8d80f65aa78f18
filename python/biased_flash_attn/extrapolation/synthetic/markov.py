"""Documents from random Markov chains, which a model learns from the context alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .tasks import SCORED, Documents, Task, Window


class Markov(Task):
    """Each document has a Markov chain of its own, which its tokens reveal little by little.

    The next state depends on the last one by a matrix of transitions, whose rows are drawn
    uniformly from all distributions. With a small probability the chain restarts instead: a token
    RESTART, and then a state of which all are equally likely. Documents begin with RESTART.

    The best prediction follows from the numbers of transitions so far (Laplace's rule): a model
    should average over all earlier tokens that were preceded by the same state. As the states
    before RESTART say nothing about the one after it, a window that begins with it is a document.
    """

    STATES = 4
    RESTART = STATES
    RESTARTS = 1 / 32  # per token

    vocabulary = STATES + 1
    shortest = SCORED
    has_gain = True

    def batch(self, count, length, generator):
        tokens = draw(random_chains(count, generator), length + 1, (), generator)
        return tokens[:, :-1], tokens[:, 1:]

    def documents(self, count, lengths, generator):
        chains = random_chains(count, generator)
        starts = [lengths[-1] - length for length in lengths]
        return Chains(chains, draw(chains, lengths[-1], starts, generator))


@dataclass(frozen=True, eq=False)
class Chains(Documents):
    transitions: Tensor
    tokens: Tensor

    def window(self, length):
        tokens = self.tokens[:, -length:]
        followed = tokens[:, -SCORED:, None].expand(-1, -1, Markov.vocabulary)
        return Window(tokens, self.transitions.gather(1, followed), optimum(tokens))


def random_chains(count: int, generator: torch.Generator) -> Tensor:
    """Transitions of tokens, RESTART included, (count, V, V) float64."""
    shape = count, Markov.STATES, Markov.STATES
    weights = torch.empty(shape, dtype=torch.float64).exponential_(generator=generator)
    return with_restarts(weights / weights.sum(-1, keepdim=True))


def with_restarts(states: Tensor) -> Tensor:
    """Transitions of tokens (..., V, V), from those of states (..., STATES, STATES)."""
    start = torch.full_like(states[..., :1, :], 1 / Markov.STATES)
    rows = torch.cat([states, start], -2)
    restart = torch.full_like(rows[..., :1], Markov.RESTARTS)
    return torch.cat([(1 - Markov.RESTARTS) * rows, restart], -1)


def draw(transitions: Tensor, length: int, starts, generator: torch.Generator) -> Tensor:
    """Tokens (B, length) of chains, with RESTART at the beginning and at the places `starts`."""
    cumulative = transitions.cumsum(-1)
    uniform = torch.rand(len(transitions), length, 1, dtype=torch.float64, generator=generator)
    tokens = torch.full((len(transitions), length), Markov.RESTART)
    each = torch.arange(len(transitions))
    for n in range(1, length):
        if n not in starts:
            # The last sum may be less than 1 by rounding.
            row = cumulative[each, tokens[:, n - 1], :-1]
            tokens[:, n] = (row <= uniform[:, n]).sum(-1)
    return tokens


def optimum(tokens: Tensor) -> Tensor:
    """The best prediction after each of the last SCORED tokens (B, N), (B, SCORED, V) float64."""
    before, after = (F.one_hot(t, Markov.vocabulary) for t in (tokens[:, :-1], tokens[:, 1:]))
    first = tokens.shape[1] - SCORED
    seen = before[:, :first].double().mT @ after[:, :first].double()
    pairs = before[:, first:, :, None] * after[:, first:, None, :]
    later = torch.cat([torch.zeros_like(pairs[:, :1]), pairs], 1).cumsum(1)
    counts = (seen[:, None] + later)[..., : Markov.STATES, : Markov.STATES]
    states = (counts + 1) / (counts.sum(-1, keepdim=True) + Markov.STATES)
    last = tokens[:, -SCORED:, None, None].expand(-1, -1, 1, Markov.vocabulary)
    return with_restarts(states).gather(2, last)[:, :, 0]
