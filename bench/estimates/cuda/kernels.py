"""Compiles the CUDA kernels for an H100, and describes their warp groups to the simulation."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from bench.machine_code.sass import disassemble
from biased_flash_attn.cuda_kernels import nvrtc
from biased_flash_attn.cuda_kernels.variants import (
    BackwardAll,
    BackwardKeys,
    BackwardQueries,
    Variant,
)

from ..gpu import Gpu
from ..pipes import L2, SHARED, SHARED_BYTES, WARPS_OF_A_GROUP, operand_bytes, pipe_cycles
from . import events, paths
from .events import ALL, DKV, DQ, FORWARD, KEYS, TILES, VALUES, Summer
from .paths import Path, Paths
from .simulate import COPY_LATENCIES, OWN, Copy, OneBlock, steps

KINDS = {FORWARD: Variant, ALL: BackwardAll, DQ: BackwardQueries, DKV: BackwardKeys}
OF_KEYS = (ALL, DKV)  # kernels whose blocks have keys
ELEMENT, ELEMENT_BYTES = "Bfloat16", 2
PERSISTENT = (FORWARD,)  # kernels whose blocks compute one block of rows after another
# Cycles from the end of a block to the first instruction of the next one, which is a guess.
LAUNCH = 1000
SHORT, LONG = 6, 16  # numbers of tiles that are simulated: their difference is a steady state


@dataclass(frozen=True)
class Kernel:
    name: str
    variant: Variant
    paths: Paths = field(repr=False)
    summers: tuple[tuple[Summer, Path], ...] = field(default=(), repr=False)

    @property
    def block_n(self) -> int:
        """Rows of a tile: keys or, for dK and dV, queries."""
        return self.variant.tile.block_n

    @property
    def block_m(self) -> int:
        """Rows of a block: queries or, for dK and dV, keys."""
        return self.variant.block_m

    @property
    def warps(self) -> int:
        """Those that compute."""
        return self.variant.groups * WARPS_OF_A_GROUP

    @property
    def tile_bytes(self) -> int:
        """The bytes of a tile of both operands, which a block copies to shared memory."""
        return ELEMENT_BYTES * self.block_n * (self.variant.head_dim + self.variant.value_dim)

    def copies(self, tiles: int) -> list[Copy]:
        """Those of the producer for a block of rows, in order."""
        variant, rounds = self.variant, self._rounds_of_loads
        own = ELEMENT_BYTES * self.block_m * variant.head_dim
        stages = variant.tile.stages
        if self.name != FORWARD:
            own += ELEMENT_BYTES * self.block_m * variant.value_dim
            return [Copy(OWN, own, 1), *[Copy(TILES, self.tile_bytes, stages, rounds)] * tiles]
        row_bytes = ELEMENT_BYTES * self.block_n
        keys = Copy(KEYS, row_bytes * variant.head_dim, stages, rounds)
        values = Copy(VALUES, row_bytes * variant.value_dim, stages)
        return [keys, Copy(OWN, own, 1), *[keys, values] * (tiles - 1), values]

    @property
    def sums_bytes(self) -> int:
        """What a block adds to the sums of a tile of queries."""
        return self.variant.sums_bytes if self.name == ALL else 0

    @property
    def _rounds_of_loads(self) -> int:
        """How often the producer waits for numbers of a tile: it loads all that the form needs at a
        time and, for dK and dV, lse and D before them."""
        return (self.name in OF_KEYS) + (self.variant.form not in ("None", "Linear"))

    def simulated(self, gpu: Gpu, blocks: int, tiles: int) -> float:
        """The cycles of some blocks of rows, one after another, with whole tiles alone."""
        parts = self.paths.before, self.paths.whole, self.paths.last, self.paths.after
        of_parts = events.parts(self.name, self.variant)
        with_events = zip(parts, of_parts.waits, of_parts.releases, strict=True)
        before, whole, last, after = (steps(*part, gpu) for part in with_events)
        ahead = 0 if self.name in OF_KEYS else 1  # the first tile is before the loop
        program = (before + whole * (tiles - ahead - 1) + last + after) * blocks
        copies = self.copies(tiles) * blocks
        groups, handovers = self.variant.groups, events.handovers(self.variant)
        summers = [
            steps(path, one.waits, one.releases, gpu) * tiles * blocks for one, path in self.summers
        ]
        runs = (
            OneBlock(program, groups, copies, gpu, latency, handovers, summers).run()
            for latency in COPY_LATENCIES
        )
        return statistics.mean(runs)

    def pipes(self, gpu: Gpu) -> Counter[str]:
        """The cycles of each unit for one whole tile of a block."""
        found = pipe_cycles(self.paths.whole, self.warps, gpu)
        for _, path in self.summers:
            found.update(pipe_cycles(path, 1, gpu))
        products = [one for one in self.paths.whole if one.name == "HGMMA"]
        read = self.variant.groups * sum(map(operand_bytes, products))
        copied = self.tile_bytes + self.sums_bytes
        found[SHARED] += (read + copied) / SHARED_BYTES
        found[L2] += copied / gpu.l2_bytes
        return found


class Cycles(NamedTuple):
    """The cycles before and after all blocks of rows of a multiprocessor, of each block besides its
    tiles, and of each whole tile."""

    once: float
    block: float
    tile: float


@cache
def cycles(kernel: Kernel, gpu: Gpu) -> Cycles:
    short, long = (kernel.simulated(gpu, 1, tiles) for tiles in (SHORT, LONG))
    tile = (long - short) / (LONG - SHORT)
    alone = max(0.0, short - SHORT * tile)
    if kernel.name not in PERSISTENT:
        return Cycles(0.0, LAUNCH + alone, tile)
    two = kernel.simulated(gpu, 2, SHORT)
    block = max(0.0, two - short - SHORT * tile)
    return Cycles(LAUNCH + alone - block, block, tile)


@cache
def build(name: str, form: str, head_dim: int, trained: bool = False) -> Kernel:
    """Compiles a kernel for bfloat16; trained: with the gradients of the form."""
    arguments = form, ELEMENT, head_dim, head_dim
    variant = KINDS[name](*arguments, *([] if name == FORWARD else [trained]))
    image = nvrtc.compile_kernel(variant.source, variant.expression, "sm_90a").image
    *waits, _ = map(len, events.parts(name, variant).waits)
    code = disassemble(image)
    summers = tuple(
        (one, paths.of_summer(code, len(one.waits), one.counts, one.outer))
        for one in events.summers(variant)
    )
    return Kernel(name, variant, paths.of_consumers(code, *waits, name in PERSISTENT), summers)


def backward(form: str, head_dim: int, causal: bool = True) -> tuple[str, ...]:
    """The kernels of the backward pass, besides those that take no products."""
    one_pass = BackwardAll.computes(form, ELEMENT, head_dim, head_dim, causal)
    return (ALL,) if one_pass else (DQ, DKV)
