"""The time of a decoding step: one new token per sequence attends to a cache of n tokens.

Every program attends to one part of a sequence's keys with all query heads that share a key head,
and a second kernel merges the parts. No keys are skipped. The sizes of pages and groups of heads
are those of bench/machine_code/compiled.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from biased_flash_attn.triton_kernels.launch.decoding import parts_of_sequence

from bench.machine_code.compiled import GROUP, VECTORS

from .gpu import Gpu
from .kernels import build
from .tiles import DECODE, MERGE
from .times import Problem, nanoseconds

_, KEY_RANK, _ = VECTORS["relative_last"]
# Bytes of the bias per key and query head, where they grow with the cache.
BIAS_BYTES = {
    "cumulative": 8,
    "cumulative-gain": 8,
    "log1p_square-gain": 8,
    "distance": 4,
    "dense": 4,
    "relative_last": 4 * KEY_RANK,
}


@dataclass(frozen=True)
class Step:
    form: str
    problem: Problem
    parts: int  # of each sequence
    milliseconds: float
    bytes: int  # of the keys, the values and the bias

    @property
    def rate(self) -> float:
        """Bytes per nanosecond."""
        return self.bytes / (self.milliseconds * 1e6)


def step(gpu: Gpu, form: str, problem: Problem) -> Step:
    decode, merge = (build(gpu.arch, name, form, problem.head_dim) for name in (DECODE, MERGE))
    programs = problem.batch * -(-problem.heads // GROUP)
    tiles = -(-problem.n // decode.block_n)
    parts = parts_of_sequence(programs, tiles)
    found = bytes_read(form, problem)
    reading = max(found / gpu.hbm, nanoseconds(decode, gpu, passes(tiles, parts), programs))
    merging = nanoseconds(merge, gpu, [[]], problem.batch * problem.heads)
    return Step(form, problem, parts, 1e-6 * (reading + merging), found)


def passes(tiles: int, parts: int) -> list[list[int]]:
    """The tiles of each part, of which the last ones may have fewer."""
    of_part = -(-tiles // parts)
    return [[max(0, min(of_part, tiles - part * of_part))] for part in range(parts)]


def bytes_read(form: str, problem: Problem) -> int:
    of_key = 2 * 2 * problem.head_dim // GROUP + BIAS_BYTES.get(form, 0)
    return of_key * problem.batch * problem.heads * problem.n
