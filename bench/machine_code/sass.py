"""Reads the machine code of a kernel: its instructions, their control fields and its loops.

Since Volta, 21 bits of every instruction tell the scheduler what to do: for how many cycles the
warp waits before its next instruction, which of six scoreboards the instruction sets until its
result is written or its operands are read, and which scoreboards it waits for. The compiler
computes them, so a simulation need not know anything else about dependences through registers.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
NO_SCOREBOARD = 7

_TEXT = re.compile(
    r"\s+/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?(\S+)(.*?);\s+/\* 0x[0-9a-f]{16} \*/"
)
_CONTROL = re.compile(r"\s+/\* 0x([0-9a-f]{16}) \*/")
_LABEL = re.compile(r"(\.L_x_\d+):")


@dataclass(frozen=True)
class Instruction:
    opcode: str  # with its modifiers
    operands: str
    predicate: str | None
    stall: int  # cycles until the warp may issue its next instruction
    sets: int  # the scoreboard that is released when the result is written
    sets_read: int  # the scoreboard that is released when the operands are read
    waits: int  # a bit mask of scoreboards

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def access_bytes(self) -> int:
        """The bytes that a warp reads or writes if all of its lanes are active."""
        if matrices := re.search(r"\.MT?88(?:\.(\d))?", self.opcode):
            return 128 * int(matrices[1] or 1)
        width = re.search(r"\.[US]?(128|64|16|8)\b", self.opcode)
        return 32 * int(width[1] if width else 32) // 8

    @property
    def never_runs(self) -> bool:
        return self.predicate in ("@!PT", "@!UPT")


@dataclass(frozen=True)
class Loop:
    """The instructions begin, ..., end - 1, the last of which branches to the first."""

    begin: int
    end: int


@dataclass(frozen=True)
class Code:
    instructions: tuple[Instruction, ...]
    loops: tuple[Loop, ...]  # by their first instruction; an outer loop comes before an inner one
    branches: tuple[tuple[int, int], ...]  # the positions of each branch and of its target

    def body(self, loop: Loop) -> tuple[Instruction, ...]:
        return self.instructions[loop.begin : loop.end]

    @property
    def end(self) -> int:
        """The end of what all warps execute. Behind the last EXIT are detours of warps whose lanes
        diverge, which branch back."""
        exits = (at for at, one in enumerate(self.instructions) if one.name == "EXIT")
        return max(exits, default=len(self.instructions) - 1) + 1

    @property
    def outer_loops(self) -> tuple[Loop, ...]:
        """The loops that lie in no other."""
        found: list[Loop] = []
        for loop in self.loops:
            if loop.end <= self.end and (not found or loop.begin >= found[-1].end):
                found.append(loop)
        return tuple(found)


def tool(name: str, *arguments: str) -> str:
    """Returns what one of the tools that Triton ships prints."""
    # On standard error, nvdisasm warns about the output format of newer assemblers.
    done = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


@lru_cache(maxsize=1)  # of one kernel after another, as code takes megabytes
def disassemble(cubin: bytes) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return parse(tool("nvdisasm", "-c", "-hex", "--no-dataflow", file.name))


def parse(assembly: str) -> Code:
    """Parses the output of `nvdisasm -c -hex --no-dataflow` for one kernel."""
    labels, instructions, targets = {}, [], {}
    lines = assembly.splitlines()
    for line, following in itertools.pairwise(lines):
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif (text := _TEXT.match(line)) and (control := _CONTROL.match(following)):
            one = _instruction(*text.groups(), int(control[1], 16) >> 41)
            target = re.search(r"`\((\.L_x_\d+)\)", text[3])
            # BSSY also names a label, but only announces where the lanes of a warp will meet again.
            if target and one.name == "BRA":
                targets[len(instructions)] = target[1]
            instructions.append(one)
    branches = tuple((at, labels[label]) for at, label in targets.items())
    # Branches to themselves pad the last line of the code.
    loops = [Loop(target, at + 1) for at, target in branches if target < at]
    loops.sort(key=lambda loop: (loop.begin, -loop.end))
    return Code(tuple(instructions), tuple(loops), branches)


def _instruction(predicate: str | None, opcode: str, operands: str, control: int) -> Instruction:
    return Instruction(
        opcode,
        operands.strip(),
        predicate,
        stall=control & 15,
        sets=control >> 5 & 7,
        sets_read=control >> 8 & 7,
        waits=control >> 11 & 63,
    )
