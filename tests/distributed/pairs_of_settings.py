"""The settings of exact cases, apart from what runs them, which takes seconds to import."""

from __future__ import annotations

import torch

from tests.support.biases import FORMS
from tests.support.cases import Case, pairwise

SOME_SHIPPED = ["kerple_log", "sandwich", "t5-both", "cable", "kernelized_cable", "forget_gate"]
CASES = [
    Case(lengths=(row["n"], row["n"]), **{k: x for k, x in row.items() if k != "n"})
    for row in pairwise(
        bias=[*FORMS, "dense", "dense-shared", *SOME_SHIPPED],
        dtype=[torch.float64, torch.float32, torch.bfloat16],
        n=[8, 48, 264],
        dims=[(16, 16), (3, 8)],
        heads=[(1, 1), (4, 2)],
        causal=[True, False],
        window=[None, 1, 7, 100],
        layout=["contiguous", "heads_inside"],
    )
]


def cases_of(ranks: int) -> list[Case]:
    """The cases, fewer for more ranks."""
    return CASES[:: ranks // 2]
