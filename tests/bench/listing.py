"""Machine code as nvdisasm prints it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from bench.machine_code.sass import NO_SCOREBOARD, Instruction


def instruction(
    opcode: str, operands: str = "", predicate: str | None = None, **control
) -> Instruction:
    defaults = {"stall": 1, "sets": NO_SCOREBOARD, "sets_read": NO_SCOREBOARD, "waits": 0}
    return Instruction(opcode, operands, predicate, **defaults | control)


def listing(
    instructions: Sequence[Instruction], labels: Mapping[int, str], branches: Mapping[int, str]
) -> str:
    """The output of nvdisasm, with random yield hints and operand reuse flags."""
    lines = []
    for at, one in enumerate(instructions):
        if at in labels:
            lines.append(f"{labels[at]}:")
        target = f" `({branches[at]})" if at in branches else ""
        fields = one.stall | one.sets << 5 | one.sets_read << 8 | one.waits << 11
        word = (fields | random.getrandbits(1) << 4) << 41 | random.getrandbits(41)
        predicate = f"{one.predicate} " if one.predicate else ""
        text = f"        /*{16 * at:04x}*/    {predicate}{one.opcode} {one.operands}{target} ;"
        lines += [f"{text}  /* 0x{random.getrandbits(64):016x} */", f"      /* 0x{word:016x} */"]
    return "\n".join(lines)
