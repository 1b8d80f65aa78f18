"""Faults that are planted in the CPU kernels, for `check` to find."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from biased_flash_attn import backends

LENGTH = 72
KERNELS = backends.get("cpu")


def shown_for_another(x):
    """The last rows show what the rows before them should."""
    x[:, :, -16:] = x[:, :, -32:-16].clone()


def unwritten(x):
    x[0, -1, -1] = torch.nan


def a_tile_missing(x):
    x[:, 1, 16:32] = 0


def shifted(x):
    x.copy_(x.roll(1, -1))


def too_large(x):
    x.mul_(1.05)


class Fault(NamedTuple):
    """A result of a kernel that is wrong, and the result of `check` that is then wrong.

    index: its place in the results of the kernel, or in the tensors of the form among them.
    """

    form: str
    result: str
    kernel: str
    index: int | tuple[int, int]
    change: Callable[[Tensor], None]

    def plant(self, monkeypatch) -> None:
        plant(monkeypatch, self.kernel, self.index, self.change)

    def __str__(self) -> str:
        return f"{self.form}: {self.result}"


FAULTS = (
    Fault("none", "o", "forward", 0, shown_for_another),
    Fault("linear", "lse", "forward", 1, a_tile_missing),
    Fault("linear", "gradient of slopes", "backward", (3, 0), Tensor.zero_),
    Fault("cumulative", "gradient of q", "backward", 0, shown_for_another),
    Fault("distance", "gradient of k", "backward", 1, a_tile_missing),
    Fault("none", "gradient of v", "backward", 2, unwritten),
    Fault("cumulative", "gradient of steps", "backward", (3, 0), too_large),
    Fault("cumulative with gain", "gradient of steps", "backward", (3, 0), too_large),
    Fault("cumulative with gain", "gradient of gain", "backward", (3, 1), a_tile_missing),
    Fault("log1p_square", "gradient of steps", "backward", (3, 0), too_large),
    Fault("log1p_square", "gradient of gain", "backward", (3, 1), shown_for_another),
    Fault("distance", "gradient of table", "backward", (3, 0), shifted),
    Fault("normalized", "o", "forward", 0, a_tile_missing),
    Fault("normalized", "gradient of c", "backward", (3, 0), unwritten),
    Fault("normalized", "gradient of L_multiplier", "backward", (3, 1), Tensor.zero_),
    Fault("normalized", "gradient of mlp.0.weight", "backward", (3, 3), shifted),
    Fault("normalized", "gradient of mlp.0.bias", "backward", (3, 4), shifted),
    Fault("normalized", "gradient of mlp.2.weight", "backward", (3, 3), Tensor.zero_),
    Fault("normalized", "gradient of mlp.2.bias", "backward", (3, 4), Tensor.zero_),
    Fault("relative", "o", "forward", 0, shown_for_another),
    Fault("relative", "gradient of query_factors", "backward", (3, 0), a_tile_missing),
    Fault("relative", "gradient of query_tables", "backward", (3, 1), shifted),
    Fault("relative_last", "o", "forward", 0, a_tile_missing),
    Fault("relative_last", "gradient of query_factors", "backward", (3, 0), shown_for_another),
    Fault("relative_last", "gradient of query_tables", "backward", (3, 1), shifted),
    Fault("relative_last", "gradient of key_factors", "backward", (3, 2), a_tile_missing),
    Fault("relative_last", "gradient of key_tables", "backward", (3, 3), shifted),
    Fault("dense", "o", "forward", 0, shown_for_another),
    Fault("dense", "gradient of values", "backward", (3, 0), a_tile_missing),
)


def plant(monkeypatch, name: str, index: int | tuple[int, int], change) -> None:
    """One result of a kernel is wrong."""
    right = getattr(KERNELS, name)

    def wrong(*arguments, **settings):
        results = right(*arguments, **settings)
        if isinstance(index, int):
            change(results[index])
        elif results[index[0]]:
            change(results[index[0]][index[1]])
        return results

    monkeypatch.setattr(KERNELS, name, wrong)
