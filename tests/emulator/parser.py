"""Translates PTX text to kernels that the emulator's core executes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from . import operands
from .operands import Scope, size_of

MULTIPROCESSOR_REGISTERS, MAX_THREAD_REGISTERS = 2**16, 256
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)[^\n/]*(?://\s*([^\s:]+:\d+))?")
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
_VARIABLE = re.compile(
    r"(?:\.(?:visible|weak|extern)\s+)?\.(shared|global|const|local)\s+((?:\.\w+\s+)*?(?:\.align\s+\d+\s+)?"
    r"(?:\.\w+\s+)*)([\w$]+)\s*((?:\[\d*\])*)\s*(?:=\s*(.*))?$",
    re.DOTALL,
)
_LABEL = re.compile(r"^[\w$]+$")
_ALIGN = re.compile(r"\.align\s+(\d+)")
_TYPE = re.compile(r"\.([a-z]+\d+)\b")


@dataclass
class Parameter:
    type: str
    size: int
    offset: int


@dataclass
class Statement:
    """An instruction, a declaration or a label, and its scope."""

    text: str
    line: int
    scope: Scope
    is_label: bool = False
    source: str = ""


@dataclass
class Instruction:
    opcode: str
    line: int
    text: str
    source: str


@dataclass
class Kernel:
    """An entry of a module: `launch` executes it."""

    name: str
    parameters: list[Parameter]
    threads: tuple[int, int, int] | None
    cluster: tuple[int, int, int] | None
    shared_bytes: int
    instructions: list[Instruction]
    program: object
    module: Module


@dataclass
class Module:
    target: str
    kernels: dict[str, Kernel] = field(default_factory=dict)
    # Variables of the module in global and constant memory, and whether kernels may write them.
    variables: dict[str, tuple[np.ndarray, bool]] = field(default_factory=dict)


def parse(text: str) -> Module:
    """Parses a module. Unknown instructions are errors only when they are executed."""
    target = re.search(r"^\.target\s+(\w+)", text, re.MULTILINE)
    module = Module(target[1] if target else "")
    files = {int(number): name.rpartition("/")[2] for number, name in _FILE.findall(text)}
    sources = {n: _source(line, files) for n, line in enumerate(text.splitlines(), 1)}
    plain = _COMMENT.sub(lambda found: "\n" * found[0].count("\n"), text)
    shared = {}
    for head, body, line in _parts(plain):
        if ".entry" in head:
            kernel = _kernel(module, head, body, line, sources, dict(shared))
            module.kernels[kernel.name] = kernel
        elif body is None:
            _declare(module, head, shared)
    return module


def _source(line: str, files: dict[int, str]) -> str:
    found = _LOC.search(line)
    if not found:
        return ""
    return found[3] or f"{files.get(int(found[1]), '?')}:{found[2]}"


def _parts(text: str) -> Iterator[tuple[str, str | None, int]]:
    """Functions as (head, body, line of the body), and other statements as (text, None, line)."""
    start = at = 0
    while at < len(text):
        if text[at] == ";":
            yield text[start:at].strip(), None, 0
            start = at + 1
        elif text[at] == "{":
            end = _closing(text, at)
            head = text[start:at].strip()
            if "=" not in head:  # not the initial values of a variable
                yield head, text[at + 1 : end], text.count("\n", 0, at) + 1
                start = end + 1
            at = end
        at += 1


def _closing(text: str, at: int) -> int:
    depth = 0
    for found in re.compile("[{}]").finditer(text, at):
        depth += 1 if found[0] == "{" else -1
        if depth == 0:
            return found.start()
    raise ValueError("PTX ends within braces")


@dataclass
class Variable:
    space: str
    name: str
    size: int  # 0 if the launch determines it
    align: int
    numbers: list[int]
    type: str


def _variable(text: str) -> Variable | None:
    # Module directives without a semicolon may precede it.
    declared = text.partition("=")[0]
    text = text[max(declared.rfind("\n."), 0) :].strip()
    found = _VARIABLE.search(text)
    if not found:
        return None
    space, modifiers, name, dimensions, values = found.groups()
    align = _ALIGN.search(modifiers)
    type_ = _TYPE.findall(modifiers)[-1]
    count = 1
    for n in re.findall(r"\[(\d*)\]", dimensions):
        count *= int(n or 0)
    numbers = [int(n, 0) for n in re.findall(r"-?\b(?:0x[0-9a-fA-F]+|\d+)\b", values or "")]
    natural = size_of(type_)
    return Variable(
        space, name, natural * count, int(align[1]) if align else natural, numbers, type_
    )


def _declare(module: Module, text: str, shared: dict[str, Variable]) -> None:
    variable = _variable(text)
    if variable is None:
        return
    if variable.space == "shared":
        shared[variable.name] = variable
        return
    # A slice of a larger array has the required alignment.
    padded = np.zeros(variable.size + variable.align, np.uint8)
    first = -padded.ctypes.data % variable.align
    data = padded[first : first + variable.size]
    width = size_of(variable.type)
    for i, number in enumerate(variable.numbers):
        data[i * width : (i + 1) * width] = list(
            (number % 2 ** (8 * width)).to_bytes(width, "little")
        )
    module.variables[variable.name] = data, variable.space == "global"


def _kernel(module, head, body, line, sources, shared) -> Kernel:
    name = re.search(r"\.entry\s+([\w$]+)", head)[1]
    parameters, symbols = _parameters(head)
    statements = list(_statements(body, line, sources))
    declared = [s.text for s in statements if s.text.startswith((".shared", ".local"))]
    variables = [_variable(text) for text in declared]
    for variable in variables:
        if variable.space == "shared":
            shared[variable.name] = variable
    static = 0
    for variable in sorted(shared.values(), key=lambda v: v.size == 0):  # dynamic memory comes last
        static = -(-static // variable.align) * variable.align
        symbols[variable.name] = "shared", static
        static += variable.size
    local = 0
    for variable in variables:
        if variable.space == "local":
            local = -(-local // variable.align) * variable.align
            symbols[variable.name] = "integer", local
            local += variable.size
    for variable, (data, _) in module.variables.items():
        symbols[variable] = "integer", data.ctypes.data
    builder = operands.Builder(symbols)
    instructions = builder.build(statements)
    program = builder.program
    program.static_shared_bytes = static
    program.local_bytes = local
    program.thread_registers = _thread_registers(head)
    return Kernel(
        name,
        parameters,
        _numbers(head, r"\.(?:req|max)ntid"),
        _numbers(head, r"\.reqnctapercluster"),
        static,
        [Instruction(opcode, s.line, s.text, s.source) for opcode, s in instructions],
        program,
        module,
    )


def _thread_registers(head: str) -> int:
    """The registers that a thread has at first, if directives determine them: the assembler gives
    kernels that change their number as many as fit into a multiprocessor."""
    if declared := _numbers(head, r"\.maxnreg"):
        return min(-(-declared[0] // 8) * 8, MAX_THREAD_REGISTERS)
    threads = _numbers(head, r"\.(?:req|max)ntid")
    if threads is None:
        return 0
    blocks = _numbers(head, r"\.minnctapersm") or (1, 1, 1)
    fitting = MULTIPROCESSOR_REGISTERS // (math.prod(threads) * blocks[0])
    return min(fitting // 8 * 8, MAX_THREAD_REGISTERS)


def _numbers(head: str, directive: str) -> tuple[int, int, int] | None:
    found = re.search(directive + r"\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", head)
    return tuple(int(n or 1) for n in found.groups()) if found else None


def _parameters(head: str) -> tuple[list[Parameter], dict[str, tuple[str, int]]]:
    parameters, symbols, offset = [], {}, 0
    for text in re.findall(r"\.param\s+([^,()]*)", head):
        type_ = _TYPE.findall(text)[-1] if ".ptr" not in text else _TYPE.findall(text)[0]
        name, count = re.search(r"([\w$]+)\s*(?:\[(\d+)\])?\s*$", text).groups()
        size = size_of(type_) * int(count or 1)
        align = _ALIGN.search(text) if ".ptr" not in text else None
        align = int(align[1]) if align else size_of(type_)
        offset = -(-offset // align) * align
        parameters.append(Parameter(type_, size, offset))
        symbols[name] = "parameter", offset
        offset += size
    return parameters, symbols


def _statements(body: str, line: int, sources: dict[int, str]) -> Iterator[Statement]:
    """Instructions, labels and declarations, in order."""
    scope, start, at, source, source_line = Scope(), 0, 0, "", line
    while at < len(body):
        c = body[at]
        if c == "\n":
            line += 1
            text = body[start:at].strip()
            if text.startswith((".loc", ".file", ".section", ".version")):
                if text.startswith(".loc"):
                    source = sources[source_line]
                start = at + 1
            if not body[start:at].strip():
                start = at + 1
                source_line = line
        elif c == ":" and body[at + 1 : at + 2] != ":" and _LABEL.match(body[start:at].strip()):
            yield Statement(body[start:at].strip(), line, scope, is_label=True)
            start = at + 1
        elif c == "{":
            if body[start:at].strip():
                at = _closing(body, at)
            else:
                scope, start = Scope(scope), at + 1
        elif c == "}":
            scope, start = scope.outer, at + 1
        elif c == ";":
            text = " ".join(body[start:at].split())
            if text:
                yield Statement(text, line, scope, source=source)
            start = at + 1
        at += 1
