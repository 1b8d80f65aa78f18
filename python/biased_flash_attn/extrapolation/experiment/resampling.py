"""Intervals by resampling files and seeds, with the same draws for all schemes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..tables import COVERAGE, Interval

RESAMPLES = 2000


class Resamples:
    """Weights of files and of seeds: those of the data themselves, and of draws with replacement.

    Differences between schemes are paired, as models of the same seed are compared on the same
    files.
    """

    def __init__(self, blocks: Sequence[int], seeds: int):
        """blocks: how many each file has."""
        generator = torch.Generator().manual_seed(0)
        weights = _counts(len(blocks), generator) * torch.tensor(blocks, dtype=torch.float64)
        self.files = weights / weights.sum(1, keepdim=True)
        self.seeds = _counts(seeds, generator) / seeds

    def means(self, nats: Tensor) -> Tensor:
        """The mean loss of the data, and of each resample, (1 + RESAMPLES,), from those of the
        models in each file, (seeds, files)."""
        return (self.files @ nats.mT * self.seeds).sum(1)


def interval(values: Tensor) -> Interval:
    """Of a function of `means`."""
    quantiles = torch.tensor([(1 - COVERAGE) / 2, (1 + COVERAGE) / 2], dtype=torch.float64)
    return Interval(values[0].item(), *values[1:].quantile(quantiles).tolist())


def _counts(size: int, generator: torch.Generator) -> Tensor:
    """How often each of `size` things is drawn, (1 + RESAMPLES, size); once in the first row."""
    drawn = torch.randint(size, (RESAMPLES, size), generator=generator)
    counts = torch.zeros(RESAMPLES, size, dtype=torch.float64)
    counts.scatter_add_(1, drawn, torch.ones_like(counts))
    return torch.cat([torch.ones(1, size, dtype=torch.float64), counts])
