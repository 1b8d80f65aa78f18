"""The instructions of one iteration of a loop over tiles, in which there may be inner loops.

Those are over the segments of a normalized bias that a tile has values in and, in decoding, over
the rank of the vectors of keys. The compiler unrolls some loops over segments: the unrolled copy
and then the code for the remaining iterations, of which the last is for a single one, are behind
branches that skip them.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.machine_code.compiled import VECTORS
from bench.machine_code.sass import Code, Instruction, Loop

# The segments that a tile is assumed to have values in. With 32 knots drawn uniformly from the
# range of a FIRE bias, the average is 1.2 to 1.6 in 16384 tokens and 2 to 3.4 in 4096.
SEGMENTS = 2


def iteration(code: Code, loop: Loop, form: str) -> tuple[Instruction, ...]:
    """What a warp executes in one iteration of an outer loop."""
    branches = {at: to for at, to in code.branches if loop.begin <= at < loop.end - 1}
    ends_of_inner = [at for at, to in branches.items() if to <= at]
    path, at, end = [], loop.begin, loop.begin  # end: of the code for further segments
    while at < loop.end:
        path.append(code.instructions[at])
        target = branches.get(at, at + 1)
        if target <= at:
            body = code.instructions[target : at + 1]
            path += (_iterations(form, body) - 1) * body
        elif target < end:
            at = target - 1  # the unrolled copy, or the code for more than one iteration
        elif target < loop.end and any(at < inner < target for inner in ends_of_inner):
            end = target
        at += 1
    return tuple(path)


def _iterations(form: str, inner: Sequence[Instruction]) -> int:
    if form in VECTORS:
        _, key_rank, _ = VECTORS[form]
        return key_rank
    # A value starts with the line of the first segment, but sums of gradients start with 0.
    return SEGMENTS if any(one.name == "FADD" for one in inner) else SEGMENTS - 1
