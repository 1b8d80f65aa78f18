"""Faults that are planted in the CPU kernels, for `check` to find."""

from __future__ import annotations

import torch

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


FAULTS = {
    "o": ("forward", 0, shown_for_another, "none"),
    "lse": ("forward", 1, a_tile_missing, "linear"),
    "gradient of q": ("backward", 0, shown_for_another, "cumulative"),
    "gradient of k": ("backward", 1, a_tile_missing, "distance"),
    "gradient of v": ("backward", 2, unwritten, "none"),
    "gradient of steps": ("backward", (3, 0), lambda x: x.mul_(1.05), "cumulative"),
    "gradient of gain": ("backward", (3, 1), a_tile_missing, "cumulative with gain"),
    "gradient of table": ("backward", (3, 0), lambda x: x.copy_(x.roll(1, -1)), "distance"),
}


def plant(monkeypatch, name: str, index: int | tuple[int, int], fault) -> None:
    """One result of a kernel is wrong."""
    right = getattr(KERNELS, name)

    def wrong(*arguments):
        results = right(*arguments)
        if isinstance(index, int):
            fault(results[index])
        elif results[index[0]]:
            fault(results[index[0]][index[1]])
        return results

    monkeypatch.setattr(KERNELS, name, wrong)
