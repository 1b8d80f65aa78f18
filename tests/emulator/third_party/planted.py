"""Edits of PTX that make a kernel incorrect."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from tests import emulator
from tests.support.numerics import assert_close_to_float64

WRONG = "wrong result"
RUNS = 3  # of a correct kernel, with different interleavings
RUNS_TO_FIND = 40  # of a faulty kernel: the rarest fault occurs in half of all interleavings


@dataclass
class Target:
    """A launch of a correct kernel."""

    ptx: str
    grid: tuple[int, ...]
    arguments: list
    shared_bytes: int
    out: Tensor  # the result of the kernel
    exact: Tensor

    def outcome(self, ptx: str, seed: int) -> str:
        """The kind of fault, or "" if the result is correct."""
        (kernel,) = emulator.parse(ptx).kernels.values()
        hidden = len(kernel.parameters) - len(self.arguments)  # Triton's scratch memory
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
            assert_close_to_float64(self.out, self.exact, plain, "result", self.exact.abs())
        except emulator.Fault as fault:
            return fault.kind
        except AssertionError:
            return WRONG
        return ""

    def outcomes(self, ptx: str, seed: int) -> set[str]:
        """The kinds of faults that occur in several interleavings."""
        return {self.outcome(ptx, seed + n) for n in range(RUNS)} - {""}

    def first_fault(self, ptx: str, seed: int) -> str:
        """The fault of the first interleaving in which one occurs, or "" if none does."""
        runs = (self.outcome(ptx, seed + n) for n in range(RUNS_TO_FIND))
        return next(filter(None, runs), "")


@dataclass(frozen=True)
class Planted:
    """An edit of a kernel's PTX, and the kinds of faults that the emulator may report."""

    target: str
    name: str
    expected: set[str]
    pattern: str
    replacement: str = ""
    which: int | None = None  # of the matches; None for all

    def edit(self, ptx: str) -> str:
        matches = list(re.finditer(self.pattern, ptx, re.MULTILINE))
        assert matches, f"nothing in the PTX matches {self.pattern}"
        chosen = matches if self.which is None else [matches[self.which]]
        for match in reversed(chosen):
            ptx = ptx[: match.start()] + match.expand(self.replacement) + ptx[match.end() :]
        return ptx
