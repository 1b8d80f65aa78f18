"""Intervals of losses whose models and files are samples: of all seeds, and of all text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..intervals import around
from ..tables import Interval

RESAMPLES = 1000


class Sample:
    """Means of losses over seeds and files, with intervals.

    The variance of a mean has two parts. One is that between the models of different seeds, on the
    same files. The other one is that of the mean over seeds if files are drawn again, by bootstrap.
    What differs between the models of different seeds from file to file is in both of them. The
    degrees of freedom of their sum are those of Welch and Satterthwaite. Differences between
    schemes are paired, if they are taken before, for each seed and file.
    """

    def __init__(self, blocks: Sequence[int]):
        """blocks: how many each file has."""
        self.blocks = torch.tensor(blocks, dtype=torch.float64)
        drawn = torch.randint(
            len(blocks), (RESAMPLES, len(blocks)), generator=torch.Generator().manual_seed(0)
        )
        counts = torch.zeros(RESAMPLES, len(blocks), dtype=torch.float64)
        counts.scatter_add_(1, drawn, torch.ones_like(counts))
        self.resampled = counts * self.blocks

    def __len__(self) -> int:
        """The number of files."""
        return len(self.blocks)

    def interval(self, nats: Tensor) -> Interval:
        """Of the mean of losses, or of differences, (seeds, files). One seed and one file have no
        variance of their own; with one of both, the interval is unbounded."""
        seeds, files = nats.shape
        by_seed = nats @ self.blocks / self.blocks.sum()
        mean, parts = by_seed.mean().item(), []
        if seeds > 1:
            parts.append((by_seed.var().item() / seeds, seeds - 1))
        if files > 1:
            drawn = self.resampled @ nats.mean(0) / self.resampled.sum(1)
            # As many files of equal weight would be as precise.
            equal = (self.blocks.sum() ** 2 / self.blocks.square().sum()).item()
            parts.append((drawn.var().item() * files / (files - 1), max(1, equal - 1)))
        if not parts:
            return Interval(mean, -torch.inf, torch.inf)
        variance = sum(part for part, _ in parts)
        if variance == 0:
            return Interval(mean, mean, mean)
        freedom = variance**2 / sum(part**2 / degrees for part, degrees in parts)
        return around(mean, variance, freedom)


def perplexity(nats: Interval) -> Interval:
    """The interval of exp(nats)."""
    return Interval(*torch.tensor(nats, dtype=torch.float64).exp().tolist())
