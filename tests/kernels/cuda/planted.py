"""A fault that is planted in a source of the kernels, and the kinds that the emulator reports."""

from __future__ import annotations

from typing import NamedTuple

WRONG = "wrong result"
EARLY = {"race", "in flight", "uninitialized", WRONG}
OUT_OF_STEP = EARLY | {"invalid", "deadlock"}  # a phase ends too early, and so do later ones
# Of small problems.
SETTINGS = {"dims": (64, 64), "heads": (1, 1), "causal": False, "trained": False}


class Planted(NamedTuple):
    """Replaces a text of a source, and the kinds of faults that the emulator may report."""

    name: str
    expected: set[str]
    source: str
    old: str
    new: str = ""
