"""Problems before their random numbers are drawn, and combinations of settings."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from biased_flash_attn import _C
from biased_flash_attn.forms import Geometry

INSTRUCTION_SETS = _C.instruction_sets()
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "heads_inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    # A kernel that reads beyond a row or before the first one reads NaN.
    "sliced": lambda x: torch.cat([x, torch.full_like(x, torch.nan)], -1)[..., : x.shape[-1]],
    "shifted": lambda x: torch.cat([x.new_full((1,), torch.nan), x.flatten()])[1:].view(x.shape),
    "shared": lambda x: x[:1].expand_as(x),
}


@dataclass(frozen=True)
class Case:
    """A problem up to its random numbers."""

    bias: str = "none"
    dtype: torch.dtype = torch.float32
    lengths: tuple[int, int] = (70, 70)  # queries, keys
    dims: tuple[int, int] = (16, 16)  # D, Dv
    heads: tuple[int, int] = (2, 2)  # H, Hkv
    batch: int = 2
    causal: bool = True
    window: int | None = None
    scale: float | None = None
    layout: str = "contiguous"
    trained: bool = True  # whether the bias has gradients

    def __str__(self) -> str:
        sizes = ["x".join(map(str, pair)) for pair in (self.lengths, self.dims, self.heads)]
        dtype = str(self.dtype).removeprefix("torch.")
        mask = ("causal" if self.causal else "both") + (f"-w{self.window}" if self.window else "")
        bias = self.bias + "-fixed" * (not self.trained)
        return "-".join([bias, dtype, "n{}-d{}-h{}".format(*sizes), mask, self.layout])

    @property
    def geometry(self) -> Geometry:
        return Geometry(*self.lengths, self.causal, self.window)


def pairwise(**factors: list) -> list[dict]:
    """Few combinations of values that contain every pair of values of different factors."""
    rng = random.Random(0)
    values = [(name, value) for name, options in factors.items() for value in options]
    pairs = itertools.combinations(values, 2)
    missing = {frozenset(pair): pair for pair in pairs if pair[0][0] != pair[1][0]}
    rows = []
    while missing:
        row = dict(next(iter(missing.values())))
        others = [name for name in factors if name not in row]
        for name in rng.sample(others, len(others)):

            def new_pairs(value, name=name, row=row):
                return sum(frozenset([(name, value), other]) in missing for other in row.items())

            row[name] = max(factors[name], key=lambda value: (new_pairs(value), rng.random()))
        for pair in itertools.combinations(row.items(), 2):
            missing.pop(frozenset(pair), None)
        rows.append({name: row[name] for name in factors})
    return rows
