"""Compiles kernels for a GPU, with the block sizes that ship or with others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from biased_flash_attn.triton_kernels import configs
from biased_flash_attn.triton_kernels.configs import Config
from biased_flash_attn.triton_kernels.launch.decoding import tile_sizes
from triton.runtime import driver

from bench.machine_code import compiled
from bench.machine_code.sass import Code, disassemble

from . import banks
from .gpu import Gpu
from .tiles import DECODE, DELTA, DKV, DQ, FORWARD, MERGE, RELATIVE, TABLE

# The names of kernels in configs.choose, which has no entry for the kernels of D and decoding.
FIELDS = {
    FORWARD: "forward",
    DQ: "backward_queries",
    DKV: "backward_keys",
    TABLE: "backward_table",
    RELATIVE: "backward_table",
}
REGISTER_GRANULE = 8  # registers per thread are allocated in multiples of this number
RESERVED_SHARED = 1024  # bytes that the system reserves in each block


@dataclass(frozen=True)
class Kernel:
    name: str
    form: str
    head_dim: int
    causal: bool
    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int
    shared: int  # bytes
    stores: int  # instructions in loops that move registers to memory
    conflicts: int  # cycles of an LDSM access relative to one without bank conflicts
    code: Code = field(repr=False)

    def blocks_at_once(self, gpu: Gpu) -> int:
        """The number of blocks that fit on a multiprocessor, 0 if its memory does not suffice."""
        registers = -(-self.registers // REGISTER_GRANULE) * REGISTER_GRANULE
        return min(
            gpu.registers // (registers * 32 * self.warps),
            gpu.shared_memory // (self.shared + RESERVED_SHARED),
            gpu.max_warps // self.warps,
        )


def build(
    arch: int,
    name: str,
    form: str,
    head_dim: int,
    *,
    causal: bool = True,
    trained: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    config: Config | None = None,
) -> Kernel:
    """Compiles a kernel with the block sizes of `config`, by default those that ship."""
    driver.set_active(compiled.Processor(arch))
    problem = form if causal else f"{form}-noncausal"
    used = {
        DELTA: Config(16, 0),
        DECODE: Config(*tile_sizes(compiled.GROUP, compiled.PAGE_SIZE, dtype.itemsize * head_dim)),
        MERGE: Config(1, 0),
    }
    shipped = configs.choose

    def choose(kernel, *rest):
        is_given = config is not None and kernel == FIELDS.get(name)
        found = config if is_given else shipped(kernel, *rest)
        # The first choice is that of the named kernel; later kernels may share its entry.
        used.setdefault(kernel, found)
        return found

    with choosing(choose):
        ((_, binary),) = compiled.binaries(problem, dtype, head_dim, trained, (name,))
    sizes, facts = used[FIELDS.get(name, name)], compiled.facts(binary)
    found = banks.layouts(binary.asm["ttgir"])
    return Kernel(
        name=name,
        form=form,
        head_dim=head_dim,
        causal=causal,
        block_m=sizes.block_m,
        block_n=sizes.block_n,
        warps=binary.metadata.num_warps,
        stages=binary.metadata.num_stages,
        registers=facts["registers"],
        shared=facts["shared"],
        stores=facts["stores"],
        conflicts=max((layout.conflicts() for layout in found), default=1),
        code=disassemble(binary.asm["cubin"]),
    )


@contextmanager
def choosing(choose: Callable) -> Iterator[None]:
    """Replaces configs.choose within the block."""
    shipped, configs.choose = configs.choose, choose
    try:
        yield
    finally:
        configs.choose = shipped
