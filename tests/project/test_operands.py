"""Kernels read their operands by name: a position would change its meaning without an error."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEVICE_FILES = sorted((ROOT / "triton_kernels").rglob("*.py"))
CPU_FILES = sorted((ROOT / "csrc").rglob("*.h")) + sorted((ROOT / "csrc").rglob("*.cpp"))
FORM_TENSOR = re.compile(r"\b(form_tensors|grad_form)\[\d")


def positions(source: str) -> list[str]:
    """The subscripts of operands by a number, and calls with unpacked operands, in the functions
    of a file that Triton compiles."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        if "triton.jit" not in map(ast.unparse, function.decorator_list):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Starred):
                found.append(ast.unparse(node))
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                operand = ast.unparse(node.value)
                is_size_or_constant = operand.endswith(".shape") or operand.isupper()
                if isinstance(node.slice.value, int) and not is_size_or_constant:
                    found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", DEVICE_FILES, ids=lambda path: path.stem)
def test_triton_kernels(path):
    assert positions(path.read_text()) == []


@pytest.mark.parametrize("line", ["x = queries[1]", "f(*operands)"])
def test_positions_are_found(line):
    assert positions(f"@triton.jit\ndef kernel(queries, operands):\n    {line}\n") != []


def test_cpu_kernels():
    """A form names its tensors by an enum."""
    for path in CPU_FILES:
        assert not FORM_TENSOR.search(path.read_text()), path
