"""Compiles the CUDA kernels for an H100, and describes their warp groups to the simulation."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

from bench.machine_code.sass import disassemble
from biased_flash_attn.cuda_kernels import nvrtc
from biased_flash_attn.cuda_kernels.variants import BLOCK_M, BackwardKeys, BackwardQueries, Variant

from ..gpu import Gpu
from ..pipes import L2, SHARED, SHARED_BYTES, WARPS_OF_A_GROUP, operand_bytes, pipe_cycles
from . import paths
from .paths import Paths
from .simulate import COPY_LATENCIES, OWN, WARPS, Copy, OneBlock, Producer, steps

FORWARD, DQ, DKV = "forward", "dQ", "dK, dV"
KINDS = {FORWARD: Variant, DQ: BackwardQueries, DKV: BackwardKeys}
ELEMENT_BYTES = 2
# The events that a warp waits for, and signals, in the order of the code: before the loop over
# tiles, in it, and after it.
_TILES, _KEYS, _VALUES = "tiles", "keys", "values"
_WAITS = {
    FORWARD: ((OWN, _KEYS), (_KEYS, _VALUES), (_VALUES,)),
    DQ: ((OWN, _TILES), (_TILES,), ()),
    DKV: ((OWN,), (_TILES,), ()),
}
_RELEASES = {
    FORWARD: ((_KEYS,), (_KEYS, _VALUES), ()),
    DQ: ((), (_TILES,), ()),
    DKV: ((), (_TILES,), ()),
}
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
    def tile_bytes(self) -> int:
        """The bytes of a tile of both operands, which a block copies to shared memory."""
        return ELEMENT_BYTES * self.block_n * (self.variant.head_dim + self.variant.value_dim)

    @property
    def producer(self) -> Producer:
        variant = self.variant
        own = ELEMENT_BYTES * BLOCK_M * variant.head_dim
        if self.name == FORWARD:
            sizes = {_KEYS: variant.head_dim, _VALUES: variant.value_dim}
            of_tile = [Copy(x, ELEMENT_BYTES * self.block_n * n) for x, n in sizes.items()]
        else:
            own += ELEMENT_BYTES * BLOCK_M * variant.value_dim
            of_tile = [Copy(_TILES, self.tile_bytes)]
        return Producer(own, tuple(of_tile), variant.tile.stages, self._rounds_of_loads)

    @property
    def _rounds_of_loads(self) -> int:
        """How often the producer waits for numbers of a tile: it loads 32 rows at a time, with lse
        and D for dK and dV, and four times as many entries of a table, of which a tile needs one
        for each diagonal."""
        rows = self.block_n // 32
        found = rows if self.name == DKV else 0
        if self.variant.form == "Distance":
            return found + -(-(BLOCK_M + self.block_n) // (4 * 32))
        return found + (rows if self.variant.form not in ("None", "Linear") else 0)

    def simulated(self, gpu: Gpu, tiles: int, latency: int) -> float:
        """The cycles of a block with whole tiles alone, whose copies take `latency`."""
        parts = self.paths.before, self.paths.whole, self.paths.after
        events = zip(parts, _WAITS[self.name], _RELEASES[self.name], strict=True)
        before, whole, after = (steps(*part, gpu) for part in events)
        ahead = 0 if self.name == DKV else 1  # the first tile is before the loop
        program = before + whole * (tiles - ahead) + after
        return OneBlock(program, self.producer, tiles, gpu, latency).run()

    def pipes(self, gpu: Gpu) -> Counter[str]:
        """The cycles of each unit for one whole tile of a block."""
        found = pipe_cycles(self.paths.whole, WARPS, gpu)
        products = [one for one in self.paths.whole if one.name == "HGMMA"]
        read = WARPS // WARPS_OF_A_GROUP * sum(map(operand_bytes, products))
        found[SHARED] += (read + self.tile_bytes) / SHARED_BYTES
        found[L2] += self.tile_bytes / gpu.l2_bytes
        return found


@cache
def cycles(kernel: Kernel, gpu: Gpu) -> tuple[float, float]:
    """The cycles of a block besides its tiles, and those of each whole tile."""
    short, long = (
        statistics.mean(kernel.simulated(gpu, tiles, latency) for latency in COPY_LATENCIES)
        for tiles in (SHORT, LONG)
    )
    of_tile = (long - short) / (LONG - SHORT)
    return max(0.0, short - SHORT * of_tile), of_tile


@cache
def build(name: str, form: str, head_dim: int, trained: bool = False) -> Kernel:
    """Compiles a kernel for bfloat16; trained: with the gradients of the form."""
    arguments = form, "Bfloat16", head_dim, head_dim
    variant = KINDS[name](*arguments, *([] if name == FORWARD else [trained]))
    image = nvrtc.compile_kernel(variant.source, variant.expression, "sm_90a").image
    before, in_loop, _ = map(len, _WAITS[name])
    return Kernel(name, variant, paths.of_consumers(disassemble(image), before, in_loop))
