"""Modules of the package import only from their own layer and those below."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from biased_flash_attn import biases, forms

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "biased_flash_attn"
# From the lowest to the highest; modules of one layer may import each other. The longest matching
# prefix of a module's name determines its layer.
LAYERS = [
    [
        "shared_constants",
        "shared_memory",
        "exactness",
        "tracing",
        "autocast",
        "summary",
        "keywords",
        "_C",
    ],
    ["sequences"],
    ["geometry"],
    ["forms"],
    ["problem"],
    ["arguments"],
    ["schedule"],
    ["cuda_kernels", "triton_kernels", "biases"],
    ["backends"],
    ["skipping", "batching"],
    ["operators", "validation"],
    ["attention"],
    ["varlen", "decoding", "skipping.report"],
    [""],
    ["nn", "distributed", "compat"],
    ["extrapolation", "integrations"],
    ["cli"],
    ["__main__"],
]
HEIGHTS = {name: height for height, names in enumerate(LAYERS) for name in names}


def modules() -> dict[str, Path]:
    """The files of the package by their dotted names, relative to the package."""
    found = {}
    for folder, prefix in ((PACKAGE, ()), (ROOT / "triton_kernels", ("triton_kernels",))):
        for path in folder.rglob("*.py"):
            parts = [*prefix, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = modules()


def height(module: str) -> int:
    parts = module.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), -1, -1))
    return next(HEIGHTS[prefix] for prefix in prefixes if prefix in HEIGHTS)


def imported(module: str) -> Iterator[str]:
    """The modules of the package that a module imports, including those inside functions."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = [part for part in package[: len(package) - node.level + 1] if part]
        if node.module:
            base += node.module.split(".")
        for alias in node.names:
            name = ".".join([*base, alias.name])
            yield name if name in HEIGHTS or name in MODULES else ".".join(base)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_modules_import_nothing_above_them(module):
    above = {name for name in imported(module) if height(name) > height(module)}
    assert above == set()


def test_backends_do_not_import_each_other():
    names = {"backends.reference", "backends.cpu", "backends.cuda", "backends.triton"}
    for name in names:
        assert not (names - {name}) & set(imported(name))


def test_only_the_registry_and_the_block_sizes_of_the_triton_kernels_name_forms():
    naming = {
        module
        for module, path in MODULES.items()
        if module.startswith("triton_kernels.")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in forms.names()
    }
    assert "triton_kernels.forms" in naming
    allowed = ("triton_kernels.forms", "triton_kernels.configs")
    assert {module for module in naming if not module.startswith(allowed)} == set()


def test_upward_imports_are_detected():
    assert (
        height("cli.cost")
        > height("attention")
        > height("forms.linear")
        > height("shared_constants")
    )
    assert "attention" in set(imported("varlen"))


def test_classes_of_biases_are_known_in_their_package_alone():
    """Other code asks a bias for what it can do."""
    classes = {name for name in biases.__all__ if isinstance(getattr(biases, name), type)}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            is_test = isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
            if is_test and not module.startswith("biases"):
                tested = {ast.unparse(x) for x in ast.walk(node.args[1]) if isinstance(x, ast.Name)}
                assert not tested & classes, f"{module}: {ast.unparse(node)}"
