"""The tokens whose predictions are compared: the same ones at every length of the context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Blocks:
    """Windows of files, in which some tokens are predicted, and the others are their context.

    segments: (B, longest + 1), each of one file.
    files: (B,) int64, the number of the file that holds each segment.
    """

    segments: Tensor
    files: Tensor


def choose(files: Sequence[Tensor], longest: int, scored: int, most: int) -> Blocks:
    """At most `most` blocks, evenly spaced in what files have beyond the longest context.

    Those of a file are `scored` tokens apart or more, so that their scored tokens do not overlap.
    """
    places = [
        (number, end)
        for number, file in enumerate(files)
        for end in range(longest + 1, len(file) + 1, scored)
    ]
    chosen = torch.linspace(0, len(places) - 1, min(most, len(places))).round().long().tolist()
    numbers, ends = zip(*(places[n] for n in chosen), strict=True)
    segments = [files[n][end - longest - 1 : end] for n, end in zip(numbers, ends, strict=True)]
    return Blocks(torch.stack(segments), torch.tensor(numbers))


def mean_by_file(losses: Tensor, files: Tensor) -> list[float]:
    """The mean loss in each file that has blocks, in the order of the files."""
    numbers, place, counts = files.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, place, losses.mean(1))
    return (sums / counts).tolist()
