"""Edits of PTX that make a kernel wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from tests import emulator
from tests.support.numerics import assert_close_to_float64

WRONG = "wrong result"
RUNS = 3  # of a kernel that is right, each with another interleaving
RUNS_TO_FIND = 40  # of a fault: the rarest is seen in half of all interleavings


@dataclass
class Target:
    """A launch of a kernel that is right."""

    ptx: str
    grid: tuple[int, ...]
    arguments: list
    shared_bytes: int
    out: Tensor  # what the kernel computes
    exact: Tensor

    def outcome(self, ptx: str, seed: int) -> str:
        """ "" where the PTX computes what it has to, and otherwise what is wrong."""
        (kernel,) = emulator.parse(ptx).kernels.values()
        hidden = len(kernel.parameters) - len(self.arguments)  # scratch memory of Triton's
        self.out.fill_(torch.nan)
        try:
            emulator.launch(
                kernel,
                self.grid,
                self.arguments + [0] * hidden,
                shared_bytes=self.shared_bytes,
                seed=seed,
            )
            plain = self.exact.float().to(self.out.dtype)
            assert_close_to_float64(self.out, self.exact, plain, "result")
        except emulator.Fault as fault:
            return fault.kind
        except AssertionError:
            return WRONG
        return ""

    def outcomes(self, ptx: str, seed: int) -> set[str]:
        """What is wrong with one interleaving or another."""
        return {self.outcome(ptx, seed + n) for n in range(RUNS)} - {""}

    def first_fault(self, ptx: str, seed: int) -> str:
        """What is wrong with the first interleaving that shows it, or "" where none does."""
        runs = (self.outcome(ptx, seed + n) for n in range(RUNS_TO_FIND))
        return next(filter(None, runs), "")


@dataclass(frozen=True)
class Planted:
    """An edit of a kernel's PTX, and what the emulator may say of it."""

    target: str
    name: str
    expected: set[str]
    pattern: str
    replacement: str = ""
    which: int | None = None  # of the matches; all where it is left out

    def edit(self, ptx: str) -> str:
        matches = list(re.finditer(self.pattern, ptx, re.MULTILINE))
        assert matches, f"nothing in the PTX is like {self.pattern}"
        chosen = matches if self.which is None else [matches[self.which]]
        for match in reversed(chosen):
            ptx = ptx[: match.start()] + match.expand(self.replacement) + ptx[match.end() :]
        return ptx
