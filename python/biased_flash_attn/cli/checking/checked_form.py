"""A form as `check` knows it: numbers for its tensors, its bias and the definition of that."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

# What a dimension of a tensor counts.
TOKENS, QUERIES, KEYS = "tokens", "queries", "keys"


@dataclass(frozen=True)
class Numbers:
    """Draws the numbers of a problem.

    rows: batch entries, heads and tokens. length: tokens of the longest sequence. half: whether q
    has 16 bits.
    """

    generator: torch.Generator
    rows: tuple[int, int, int]
    length: int
    half: bool

    @property
    def heads(self) -> int:
        return self.rows[1]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def rounded(self, x: Tensor) -> Tensor:
        """Numbers that the dtypes of q represent exactly."""
        return x.bfloat16().half().float() if self.half else x

    def falling(self, base: float) -> Tensor:
        """A number for each head; the smaller ones of later heads lead to wider ranges."""
        return base ** -torch.arange(1.0, self.heads + 1)


class CheckedForm:
    """A form with its tensors and its bias.

    Errors of the gradients of tensors (B or 1, H or 1, rows, channels) are judged by head and block
    of rows, as those of q are.

    Attributes:
        name: its name in the tables.
        axes: what the dimensions after batch and heads count, for tensors with values per token. A
            step of decoding passes those of its new tokens, of its queries, or of all keys so far.
        has_dtype_of_q: whether its tensors have the dtype of q, as in a model of that dtype. They
            are float32 otherwise.
        block: the number of queries that the oracle computes at once.
        longest: the most tokens of a sequence.
        timed: whether it is timed.
    """

    name: str
    axes: ClassVar[dict[str, tuple[str, ...]]] = {}
    has_dtype_of_q = False
    block = 256
    longest = sys.maxsize
    timed = True

    def draw(self, numbers: Numbers) -> Tensors:
        """The tensors of the bias, by name."""
        return {}

    def bias(self, tensors: Tensors):
        """The bias that a user would pass."""
        return None

    def pairs(self, tensors: Tensors, p: Tensor, j: Tensor) -> Tensor | None:
        """The bias of queries at positions p and keys at positions j of one sequence, which begin
        at 0. It broadcasts to (1, H, queries, keys) and is float64, or None.

        This is the definition of the bias, independent of the package's own dense views. tensors
        have the rows of these queries and keys.
        """
        return None

    def is_smooth(self, tensors: Tensors, p: Tensor) -> Tensor:
        """Whether rounding cannot move any pair of the queries at positions p across a jump of the
        derivative of the bias, (queries,) bool. Other queries have no gradients."""
        return torch.ones_like(p, dtype=torch.bool)

    def selected(self, tensors: Tensors, entry: int, **rows: Tensor) -> Tensors:
        """The tensors of a batch entry, with the given rows of each axis."""
        found = dict(tensors)
        for name, axes in self.axes.items():
            x = tensors[name][entry : entry + 1]
            for dim, axis in enumerate(axes, 2):
                x = x.index_select(dim, rows[axis])
            found[name] = x
        return found


def distances(p: Tensor, j: Tensor) -> Tensor:
    """p_i - j of all pairs, (queries, keys)."""
    return p[:, None] - j


def columns_of_rows(x: Tensor, column: Tensor) -> Tensor:
    """x[..., i, column[i, j]] for x (B, H, rows, columns) and column (rows, n)."""
    return x.gather(-1, column.expand(*x.shape[:2], -1, -1))
