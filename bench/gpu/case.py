"""Measures one case of the GPU benchmark in a separate process.

    python -m bench.gpu.case BACKEND BIAS HEAD_DIM LENGTH [--rehearse]

Checks and compiles everything, prints "ready", and waits for a line: several such processes may
prepare in parallel, and then measure one after another. Prints one JSON row per line. In separate
processes, an error on the GPU does not affect other cases, and earlier cases do not cause
recompilations.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache, partial

import torch

from bench.common.correctness import check_exact, check_same
from bench.common.implementations import ours
from bench.common.layer import Inputs, Training, draw
from bench.common.measure import in_turn
from bench.gpu.comparisons import (
    BACKWARD,
    DECODING,
    FORWARD,
    MEMORY,
    TRAINED,
    Case,
    Comparison,
    comparisons,
)
from bench.gpu.decoding import Decoding
from bench.gpu.device import Gpu, Rehearsal
from bench.reports.results import Row

DTYPE = torch.bfloat16


class Measurement:
    """A case on a device."""

    def __init__(self, case: Case, device: Gpu):
        self.case, self.device = case, device
        self.inputs = self.drawn(case.length, max(1, device.tokens // case.length))
        self.comparisons = comparisons(case, device.compiled)
        self.failures: dict[Comparison, str] = {}
        self.refusals: dict[str | None, str] = {}  # of biases that the backend does not support
        # Cached, like the code compiled for them.
        self.ours = cache(partial(ours, self.inputs, backend=case.backend))
        self.others = cache(lambda make: make(self.inputs))

    def drawn(self, length: int, batch: int) -> Inputs:
        heads = self.device.hidden // self.case.head_dim
        size = {"batch": batch, "heads": heads, "device": self.device.name}
        return draw(length, DTYPE, self.case.head_dim, **size)

    def prepare(self) -> None:
        """Fails if our results are wrong; records refusals, and failures of alternatives."""
        small = self.drawn(self.device.checked_length, batch=2)
        for bias in dict.fromkeys(comparison.bias for comparison in self.comparisons):
            try:
                check_exact(small, bias, self.case.backend)
            except ValueError as error:
                if not str(error).startswith(f"backend='{self.case.backend}'"):
                    raise
                self.refusals[bias] = str(error)
        for comparison in self.comparisons:
            if not comparison.matrices:
                self.attempt(comparison, self.check)
            self.device.release()  # other processes prepare at the same time

    def attempt(self, comparison: Comparison, what: Callable):
        """Returns what(comparison), or None if it fails, and records the reason."""
        if refusal := self.refusals.get(comparison.bias):
            self.failures[comparison] = refusal
        if comparison in self.failures:
            return None
        try:
            return what(comparison)
        except Exception as error:
            first_line = (str(error).strip().splitlines() or [""])[0]
            self.failures[comparison] = f"{type(error).__name__}: {first_line}"[:300]
            return None

    def sides(self, comparison: Comparison) -> tuple[Training, Training]:
        # Matrices are not kept: the next comparison needs the memory.
        made = comparison.make_other(self.inputs) if comparison.matrices else None
        mine = self.ours(comparison.bias, tolerance=comparison.tolerance)
        return mine, made or self.others(comparison.make_other)

    def check(self, comparison: Comparison) -> None:
        """Runs, and thereby compiles, both sides, and compares their results."""
        sides = self.sides(comparison)
        if comparison.mode == FORWARD:
            mine, other = ({"o": side.forward()} for side in sides)
        else:
            mine, other = (side() for side in sides)
        if comparison.same:
            check_same(other, {name: mine[name] for name in mine if name in other})

    def rows(self) -> Iterator[Row]:
        if self.case.bias in TRAINED:
            bias = TRAINED[self.case.bias] or f"{self.case.bias}, fixed"
            if bias not in self.refusals:
                yield self.memory(bias)
        for comparison in self.comparisons:
            if comparison.matrices:
                self.attempt(comparison, self.check)
            seconds = self.attempt(comparison, self.seconds)
            gc.collect()
            self.device.release()
            yield self.row(comparison, seconds)

    def seconds(self, comparison: Comparison) -> tuple[list[float], list[float]]:
        calls = [called(side, comparison.mode) for side in self.sides(comparison)]
        return in_turn(*calls, self.device)

    def row(self, comparison: Comparison, seconds: tuple | None) -> Row:
        mine, other = seconds or ([], [])
        aim = comparison.aim
        pairs = zip(mine, other, strict=True)
        cost = aim is not None and aim.comparison == "<="
        return Row(
            comparison.work(self.case),
            "bfloat16",
            [m / o if cost else o / m for m, o in pairs],
            "x",
            aim and aim.comparison,
            aim and aim.target,
            mine,
            other,
            aim and aim.name,
            self.failures.get(comparison),
        )

    def memory(self, bias: str) -> Row:
        """The row of the peak memory, forward and backward."""
        peaks = [self.device.peak_bytes(self.ours(name, tolerance=0.0)) for name in (bias, None)]
        return Row(
            f"{self.case.size}, peak memory: {bias} against no bias",
            "bfloat16",
            [peaks[0] / peaks[1]],
            "x",
            MEMORY.comparison,
            MEMORY.target,
            aim=MEMORY.name,
        )


def called(side: Training, mode: str) -> Callable:
    if mode == BACKWARD:
        return side.backward()
    return side.forward if mode == FORWARD else side


def main(backend: str, bias: str, head_dim: str, length: str, *rehearse: str) -> None:
    # Redirects the output of libraries.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    device = Rehearsal() if rehearse else Gpu()
    kind = Decoding if bias == DECODING else Measurement
    with device.used():
        measurement = kind(Case(bias, int(head_dim), int(length), backend), device)
        measurement.prepare()
        print("ready", file=channel, flush=True)
        if sys.stdin.readline():
            for row in measurement.rows():
                print(json.dumps(asdict(row)), file=channel, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
