"""Finds instructions that overwrite registers of asynchronous matrix products in flight.

HGMMA, the product of a warp group, reads its left operand, if that is in registers, and writes its
accumulators while the warp executes the following instructions. Only after WARPGROUP.DEPBAR has
waited for the group of products that it belongs to may its registers have other contents. ptxas
allocates the registers and places the waits, and that of CUDA 12.9 is known to reuse them too
early, which PTX, and therefore an emulator of PTX, does not show.

The analysis follows all paths through the code at once: the registers in flight before an
instruction are those in flight on any path that leads to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest
from operator import or_

from .sass import Code, Instruction

LEFT_REGISTERS = 4  # of each thread, for 64 rows of 32 bytes in a warp group
GROUPS = 8  # that are distinguished; waits allow at most 7 to be pending
# Instructions whose results take two registers, other than those that read memory.
_PAIRS = re.compile(
    r"D(ADD|MUL|FMA|MNMX)|IMAD\.WIDE|CS2R(?!\.32)|(F2F|I2F|FRND)\.F64|F2I(\.\w+)?\.[SU]64|MOV\.64"
)
_LOADS = ("LD", "LDC", "LDG", "LDL", "LDS", "LDSM", "ATOM", "ATOMG", "ATOMS")
# Their first register is an operand.
_WITHOUT_RESULT = ("BAR", "FCHK", "NANOSLEEP", "WARPSYNC")
_LEAVES = ("BRX", "CALL", "JMP", "JMX", "RET")  # for code that the analysis does not follow


@dataclass(frozen=True)
class Registers:
    """Sets of registers of products, as bit masks."""

    left: int = 0
    accumulators: int = 0

    def __or__(self, other: Registers) -> Registers:
        return Registers(self.left | other.left, self.accumulators | other.accumulators)

    @property
    def all(self) -> int:
        return self.left | self.accumulators


# The registers in flight: first those of the products after the last group, then those of each
# group, beginning with the newest.
InFlight = tuple[Registers, ...]
NONE = (Registers(),)


def overwrites(code: Code) -> list[Instruction]:
    """The instructions that write a register of a product in flight, in the order of the code."""
    before, pending = {0: NONE}, [0]
    targets = dict(code.branches)
    while pending:
        at = pending.pop()
        after = _step(code.instructions[at], before[at])
        for following in _following(code.instructions[at], at, targets.get(at)):
            known = before.get(following, NONE)
            joined = tuple(a | b for a, b in zip_longest(known, after, fillvalue=Registers()))
            if following not in before or joined != known:
                before[following] = joined
                pending.append(following)
    reached = ((code.instructions[at], reduce(or_, before[at])) for at in sorted(before))
    return [one for one, in_flight in reached if _conflicts(one, in_flight)]


def _step(one: Instruction, in_flight: InFlight) -> InFlight:
    if one.name == "HGMMA":
        newest, *groups = in_flight
        newest |= _product(one)
        if "gsb0" not in one.operands:
            return newest, *groups
        oldest = reduce(or_, groups[GROUPS - 2 :], Registers())
        return Registers(), newest, *groups[: GROUPS - 2], oldest
    if one.opcode.startswith("WARPGROUP.DEPBAR") and one.predicate is None:
        allowed = int(re.search(r"0x([0-9a-f]+)", one.operands)[1], 16)
        return in_flight[: 1 + allowed]
    return in_flight


def _following(one: Instruction, at: int, target: int | None) -> Iterator[int]:
    if target is not None:
        yield target
    always_leaves = one.name in ("EXIT", "RET") or (one.name == "BRA" and one.operands[:1] == "`")
    if one.predicate is not None or not always_leaves:
        yield at + 1


def _conflicts(one: Instruction, in_flight: Registers) -> bool:
    if one.never_runs:
        return False
    if one.name == "HGMMA":
        # Products of a warp group accumulate in the order of their issue.
        return bool(_product(one).accumulators & in_flight.left)
    if one.name in _LEAVES:
        return bool(in_flight.all)
    return bool(_written(one) & in_flight.all)


def _product(one: Instruction) -> Registers:
    """The registers of an HGMMA, whose operands are accumulators, left, right, accumulators."""
    columns = int(re.match(r"HGMMA\.64x(\d+)x", one.opcode)[1])
    accumulators, left = re.match(r"R(\d+), (?:R(\d+))?", one.operands).groups()
    in_registers = 0 if left is None else _mask(int(left), LEFT_REGISTERS)
    return Registers(in_registers, _mask(int(accumulators), columns // 2))


def _written(one: Instruction) -> int:
    """The registers that an instruction writes, as a bit mask. A predicate may come before them."""
    first = re.match(r"(?:!?(?:P\d|PT), )?R(\d+)\b", one.operands)
    if first is None or one.name in _WITHOUT_RESULT:
        return 0
    count = 1
    if one.name in _LOADS:
        count = max(1, one.access_bytes // 128)
    elif one.name == "HMMA":
        count = 4 if ".F32" in one.opcode else 2
    elif _PAIRS.match(one.opcode):
        count = 2
    return _mask(int(first[1]), count)


def _mask(first: int, count: int) -> int:
    return (1 << count) - 1 << first
