"""Resolves names in PTX to registers, immediates and addresses."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ._core import Program

_BITS = {"pred": 1, "b8": 16, "u8": 16, "s8": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32}
_INTEGER = re.compile(r"^-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_FLOAT_BITS = re.compile(r"^0[fFdD]([0-9a-fA-F]{8}|[0-9a-fA-F]{16})$")
_REAL = re.compile(r"^-?\d+\.\d*([eE][-+]?\d+)?$")
_RANGE = re.compile(r"^(.*?)<(\d+)>$")
_GUARD = re.compile(r"^@(!?)([\w$%.]+)\s+(.*)$", re.DOTALL)


def size_of(type_: str) -> int:
    """Bytes of a PTX type."""
    return {"f16x2": 4, "bf16x2": 4, "bf16": 2}.get(type_) or int(re.search(r"\d+$", type_)[0]) // 8


class Scope:
    """The declarations between two braces."""

    def __init__(self, outer: Scope | None = None):
        self.outer = outer
        self.registers: dict[str, int] = {}  # width in bits, by name
        self.ranges: dict[str, int] = {}  # width of numbered registers, by prefix
        self.labels: dict[str, int] = {}
        self.tables: dict[str, list[str]] = {}

    def declare(self, text: str) -> None:
        _, type_, names = text.split(None, 2)
        type_ = type_.lstrip(".")
        width = _BITS.get(type_) or int(re.search(r"\d+$", type_)[0])
        for name in names.split(","):
            found = _RANGE.match(name.strip())
            if found:
                self.ranges[found[1]] = width
            else:
                self.registers[name.strip()] = width

    def register(self, name: str) -> tuple[Scope, int] | None:
        """The scope that declares a register, and its width."""
        width = self.registers.get(name) or self.ranges.get(name.rstrip("0123456789"))
        if width:
            return self, width
        return self.outer.register(name) if self.outer else None

    def label(self, name: str) -> int | None:
        if name in self.labels:
            return self.labels[name]
        return self.outer.label(name) if self.outer else None

    def table(self, name: str) -> list[str] | None:
        if name in self.tables:
            return self.tables[name]
        return self.outer.table(name) if self.outer else None


class Builder:
    """Translates statements to the core's program."""

    def __init__(self, symbols: dict[str, tuple[str, int]]):
        self.symbols = symbols
        self.program = Program()
        self.numbers: dict[tuple[int, str], tuple] = {}
        self.bytes = 0
        self.smallest_shared_access = 16

    def build(self, statements: Iterable) -> list[tuple[str, object]]:
        instructions, last_label = [], None
        for statement in statements:
            text, scope = statement.text, statement.scope
            if statement.is_label:
                scope.labels[text] = len(instructions)
                last_label = text
            elif text.startswith(".reg"):
                scope.declare(text)
            elif text.startswith((".branchtargets", ".calltargets")):
                scope.tables[last_label] = [x.strip() for x in text.split(None, 1)[1].split(",")]
            elif not text.startswith("."):
                instructions.append(statement)
        made = []
        for statement in instructions:
            made.append((self.add(statement), statement))
        self.program.register_bytes = self.bytes
        self.program.register_count = len(self.numbers)
        self.program.granule_shift = self.smallest_shared_access.bit_length() - 1
        self.program.finish()
        return made

    def add(self, statement) -> str:
        text, scope, guard = statement.text, statement.scope, None
        found = _GUARD.match(text)
        if found:
            guard = self.register(found[2], scope, negated=bool(found[1]))
            text = found[3]
        opcode, _, rest = text.partition(" ")
        parts = opcode.split(".")
        self.note_access(parts)
        operands = [self.operand(one, scope) for one in split(rest)] if parts[0] != "call" else []
        self.program.add(parts, guard, operands, statement.line)
        return opcode

    def note_access(self, parts: list[str]) -> None:
        """Shared memory is recorded in units of the smallest access."""
        spaces = {"global", "local", "param", "const"}
        if parts[0] in ("ld", "st", "atom", "red") and not spaces.intersection(parts):
            count = next((int(p[1:]) for p in parts if p in ("v2", "v4", "v8")), 1)
            size = min(16, size_of(parts[-1]) * count)
            self.smallest_shared_access = min(self.smallest_shared_access, size)
        elif parts[0] == "mbarrier":
            self.smallest_shared_access = min(self.smallest_shared_access, 8)
        elif parts[0] == "tcgen05" or (parts[0] == "cp" and "bulk" not in parts):
            self.smallest_shared_access = min(self.smallest_shared_access, 4)

    def register(self, name: str, scope: Scope, negated: bool = False) -> tuple | None:
        declared = scope.register(name)
        if declared is None:
            return None
        owner, width = declared
        key = id(owner), name
        if key not in self.numbers:
            self.numbers[key] = "register", len(self.numbers), self.bytes, width
            self.bytes += 4 if width == 1 else 32 * width // 8
        return (*self.numbers[key], negated)

    def operand(self, text: str, scope: Scope) -> tuple:
        text = text.strip()
        if text == "_":
            return ("sink",)
        if text.startswith("{"):
            return "vector", [self.operand(one, scope) for one in split(text[1:-1])]
        if text.startswith("["):
            return self.address(text[1:-1], scope)
        if "|" in text:
            return "pair", [self.operand(one, scope) for one in text.split("|")]
        if text.startswith("!"):
            return self.register(text[1:].strip(), scope, negated=True)
        if register := self.register(text, scope):
            return register
        if (number := immediate(text)) is not None:
            return "integer", number
        if _REAL.match(text):
            return "real", float(text)
        if text.startswith("%"):
            return "special", text
        return self.symbol(text, scope)

    def symbol(self, text: str, scope: Scope) -> tuple:
        name, plus, offset = (part.strip() for part in text.partition("+"))
        if name in self.symbols:
            kind, value = self.symbols[name]
            return kind, value + (int(offset, 0) if plus else 0)
        if (table := scope.table(text)) is not None:
            return "targets", [("target", scope.label(label)) for label in table]
        if (target := scope.label(text)) is not None:
            return "target", target
        raise ValueError(f"{text!r} is not declared")

    def address(self, text: str, scope: Scope) -> tuple:
        base, *rest = split(text)
        found = re.match(r"^(.+?)\s*(?:([+-])\s*(-?\s*\w+))?$", base.strip())
        name, sign, offset = found.groups()
        value = int(offset.replace(" ", ""), 0) * (-1 if sign == "-" else 1) if offset else 0
        elements = [self.operand(name, scope), *(self.operand(one, scope) for one in rest)]
        return "address", elements, value


def immediate(text: str) -> int | None:
    """The bits of an integer, or of a float in hexadecimal notation."""
    if _INTEGER.match(text):
        return int(text.rstrip("U"), 0) % 2**64
    if found := _FLOAT_BITS.match(text):
        return int(found[1], 16)
    return None


def split(text: str) -> list[str]:
    """Splits at commas outside braces and brackets."""
    parts, depth, start = [], 0, 0
    for at, c in enumerate(text):
        if c in "{[(":
            depth += 1
        elif c in "}])":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    if text[start:].strip():
        parts.append(text[start:])
    return [part.strip() for part in parts]
