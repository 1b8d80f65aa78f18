"""The units that instructions occupy, for how long, and the latency of their results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import prod

from bench.machine_code.sass import Instruction

from .gpu import PARTITIONS, Gpu

MATRIX, EXP, ISSUE, FP32, ALU, FP64 = "matrix", "exp", "issue", "FP32", "ALU", "FP64"
SHARED, L2, FENCE = "shared", "L2", "fence"
PIPES = (MATRIX, EXP, ISSUE, FP32, ALU, SHARED, L2)
# One of each serves all partitions of a multiprocessor.
OF_ALL = frozenset({SHARED, L2})
WARPS_OF_A_GROUP = 4  # warps that issue products together on Hopper
SHARED_BYTES = 128  # bytes per cycle of shared memory, without bank conflicts

# Instructions that occupy the 16 lanes of a partition for two cycles (CUDA C++ programming guide).
_ALU = {
    *("FMNMX", "FSEL", "FSETP", "F2FP", "FCHK", "IADD3", "IABS", "IMNMX", "ISETP", "LEA", "LOP3"),
    *("MOV", "PLOP3", "PRMT", "SEL", "SGXT", "SHF", "VIADD", "VIMNMX", "P2R", "R2P", "BMSK"),
    *("VIADDMNMX", "IADD"),
}
_FP32 = {"FFMA", "FADD", "FMUL"}
_HALF_RATE = {"IMAD", "HFMA2", "HADD2", "HMUL2"}
_FOUR_LANES = {"MUFU", "F2F", "F2I", "I2F", "I2FP", "FRND", "POPC", "FLO", "BREV"}
_FP64 = {"DADD", "DMUL", "DFMA", "DSETP"}
# Spilled registers stay in the cache that shares its memory with shared memory.
_SHARED = {"LDS", "STS", "LDSM", "STSM", "LDGSTS", "LDL", "STL"}
_GLOBAL = {"LDG", "STG", "LDGSTS"}


@dataclass(frozen=True)
class Use:
    """The use of a unit by an instruction of one warp."""

    pipe: str
    cycles: float
    latency: float = 0.0  # cycles from the end of the use to the result


@cache
def uses(one: Instruction, gpu: Gpu, conflicts: int = 1) -> tuple[Use, ...]:
    """The units that an instruction occupies together. conflicts: see `Kernel.conflicts`."""
    name = one.name
    if one.never_runs:
        return ()
    if name in ("HGMMA", "HMMA"):
        return (_product(one, gpu),)
    if name == "SHFL":
        return (Use(SHARED, 2, 22),)
    if name == "MEMBAR":
        return (Use(FENCE, 0, gpu.fence),)
    if name in _SHARED | _GLOBAL:
        return _access(one, gpu, conflicts)
    arithmetic = (
        (_FP32, Use(FP32, gpu.fp32)),
        (_HALF_RATE, Use(FP32, 2)),
        (_ALU, Use(ALU, 2)),
        (_FOUR_LANES, Use(EXP, 8, 14)),
        (_FP64, Use(FP64, gpu.fp64, 16)),
    )
    return tuple(use for names, use in arithmetic if name in names)


def _access(one: Instruction, gpu: Gpu, conflicts: int) -> tuple[Use, ...]:
    size, found = one.access_bytes, []
    if one.name in _SHARED:
        cycles = size / SHARED_BYTES * (conflicts if one.name == "LDSM" else 1)
        found.append(Use(SHARED, cycles, gpu.shared_latency))
    if one.name in _GLOBAL:
        found.append(Use(L2, size / gpu.l2_bytes, gpu.l2_latency))
    return tuple(found)


def multiply_adds(one: Instruction) -> int:
    """The multiply-adds of an instruction of one warp (HMMA) or of a warp group (HGMMA)."""
    if one.name == "HGMMA":
        return prod(map(int, re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", one.opcode).groups()))
    return 16 * 8 * int(re.match(r"HMMA\.168(\d+)", one.opcode)[1])


def _product(one: Instruction, gpu: Gpu) -> Use:
    if one.name == "HMMA":
        # Fixed latencies are part of the control fields.
        rate = gpu.products * gpu.warp_products / PARTITIONS
        return Use(MATRIX, multiply_adds(one) / rate)
    cycles = max(multiply_adds(one) / gpu.products, operand_bytes(one) / SHARED_BYTES)
    return Use(MATRIX, cycles, 32)


def operand_bytes(one: Instruction) -> int:
    """What a product of a warp group reads from shared memory: the right operand and, unless it is
    in registers, the left one."""
    rows, columns, depth = map(int, re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", one.opcode).groups())
    left_is_shared = re.match(r"R\d+, gdesc", one.operands) is not None
    return 2 * depth * (columns + rows * left_is_shared)


def pipe_cycles(
    body: Iterable[Instruction], warps: int, gpu: Gpu, conflicts: int = 1
) -> Counter[str]:
    """The cycles of each unit of a multiprocessor while `warps` warps execute the body once."""
    found, of_partition = Counter(), warps / PARTITIONS
    for one in body:
        found[ISSUE] += of_partition
        for use in uses(one, gpu, conflicts):
            found[use.pipe] += use.cycles * (warps if use.pipe in OF_ALL else of_partition)
    return found
