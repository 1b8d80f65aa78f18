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
from functools import cache
from pathlib import Path

import triton

NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
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

    def body(self, loop: Loop) -> tuple[Instruction, ...]:
        return self.instructions[loop.begin : loop.end]


@cache
def disassemble(cubin: bytes) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [NVDISASM, "-c", "-hex", "--no-dataflow", file.name]
        # On standard error it warns about the output format of newer assemblers.
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return parse(done.stdout)


def parse(assembly: str) -> Code:
    """Parses the output of `nvdisasm -c -hex --no-dataflow` for one kernel."""
    labels, instructions, branches = {}, [], []
    lines = assembly.splitlines()
    for line, following in itertools.pairwise(lines):
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif (text := _TEXT.match(line)) and (control := _CONTROL.match(following)):
            if target := re.search(r"`\((\.L_x_\d+)\)", text[3]):
                branches.append((len(instructions), target[1]))
            instructions.append(_instruction(*text.groups(), int(control[1], 16) >> 41))
    loops = [
        Loop(labels[label], at + 1)
        for at, label in branches
        # Branches to themselves pad the last line of the code.
        if labels[label] < at and instructions[at].name == "BRA"
    ]
    loops.sort(key=lambda loop: (loop.begin, -loop.end))
    return Code(tuple(instructions), tuple(loops))


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
