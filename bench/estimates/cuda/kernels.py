"""Compiles the CUDA kernels for an H100, and describes their warp groups to the simulation."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from bench.machine_code.sass import disassemble
from biased_flash_attn.cuda_kernels import nvrtc
from biased_flash_attn.cuda_kernels.variants import BackwardKeys, BackwardQueries, Variant

from ..gpu import Gpu
from ..pipes import L2, SHARED, SHARED_BYTES, WARPS_OF_A_GROUP, operand_bytes, pipe_cycles
from . import paths
from .paths import Paths
from .simulate import COPY_LATENCIES, OWN, Copy, OneBlock, steps

FORWARD, DQ, DKV = "forward", "dQ", "dK, dV"
KINDS = {FORWARD: Variant, DQ: BackwardQueries, DKV: BackwardKeys}
ELEMENT_BYTES = 2
# The events that a warp waits for, and signals, in the order of the code: before the loop over
# tiles, in it, in its last iteration, and after it.
_TILES, _KEYS, _VALUES = "tiles", "keys", "values"
_WAITS = {
    FORWARD: ((OWN, _KEYS, _KEYS), (_VALUES, _KEYS), (_VALUES,), (_VALUES,)),
    DQ: ((OWN, _TILES), (_TILES,), (_TILES,), ()),
    DKV: ((OWN,), (_TILES,), (_TILES,), ()),
}
_RELEASES = {
    FORWARD: ((_KEYS,), (_KEYS, _VALUES), (_KEYS, _VALUES), (_VALUES, OWN)),
    DQ: ((), (_TILES,), (_TILES,), ()),
    DKV: ((), (_TILES,), (_TILES,), ()),
}
PERSISTENT = (FORWARD,)  # kernels whose blocks compute one block of rows after another
# Cycles from the end of a block to the first instruction of the next one, which is a guess.
LAUNCH = 1000
SHORT, LONG = 6, 16  # numbers of tiles that are simulated: their difference is a steady state


@dataclass(frozen=True)
class Kernel:
    name: str
    variant: Variant
    paths: Paths = field(repr=False)

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
            return [Copy(OWN, own, 1), *[Copy(_TILES, self.tile_bytes, stages, rounds)] * tiles]
        row_bytes = ELEMENT_BYTES * self.block_n
        keys = Copy(_KEYS, row_bytes * variant.head_dim, stages, rounds)
        values = Copy(_VALUES, row_bytes * variant.value_dim, stages)
        return [keys, Copy(OWN, own, 1), *[keys, values] * (tiles - 1), values]

    @property
    def _rounds_of_loads(self) -> int:
        """How often the producer waits for numbers of a tile: it loads all that the form needs at a
        time and, for dK and dV, lse and D before them."""
        return (self.name == DKV) + (self.variant.form not in ("None", "Linear"))

    def simulated(self, gpu: Gpu, blocks: int, tiles: int) -> float:
        """The cycles of some blocks of rows, one after another, with whole tiles alone."""
        parts = self.paths.before, self.paths.whole, self.paths.last, self.paths.after
        events = zip(parts, _WAITS[self.name], _RELEASES[self.name], strict=True)
        before, whole, last, after = (steps(*part, gpu) for part in events)
        ahead = 0 if self.name == DKV else 1  # the first tile is before the loop
        program = (before + whole * (tiles - ahead - 1) + last + after) * blocks
        copies = self.copies(tiles) * blocks
        groups = self.variant.groups
        runs = (OneBlock(program, groups, copies, gpu, x).run() for x in COPY_LATENCIES)
        return statistics.mean(runs)

    def pipes(self, gpu: Gpu) -> Counter[str]:
        """The cycles of each unit for one whole tile of a block."""
        found = pipe_cycles(self.paths.whole, self.warps, gpu)
        products = [one for one in self.paths.whole if one.name == "HGMMA"]
        read = self.variant.groups * sum(map(operand_bytes, products))
        found[SHARED] += (read + self.tile_bytes) / SHARED_BYTES
        found[L2] += self.tile_bytes / gpu.l2_bytes
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
    arguments = form, "Bfloat16", head_dim, head_dim
    variant = KINDS[name](*arguments, *([] if name == FORWARD else [trained]))
    image = nvrtc.compile_kernel(variant.source, variant.expression, "sm_90a").image
    *waits, _ = map(len, _WAITS[name])
    code = disassemble(image)
    return Kernel(name, variant, paths.of_consumers(code, *waits, name in PERSISTENT))
